-- What every operation of the admission queue shares; put before each of them. The policy is that of fair.py.
--
-- KEYS (all under the model's hash tag):
--   1 gateways  sorted set  gateway id -> end of its lease (ms of this server's clock)
--   2 entries   hash        request id -> [gateway, tenant, class, cost, weight, arrival (us, this server's clock), priority]
--   3 order     sorted set  class \0 tenant \0 place \0 request id, all scores 0: ordered as text
--                           place: priority + 2^31 (10 digits), arrival (16 digits)
--   4 grants    hash        request id -> [gateway, cost]
--   5 meta      hash        waiting_cost, granted_cost, credit, clock:<class>
--   6 active:interactive, 7 active:batch   sorted set  tenant that waits -> virtual time
--   8 idle:interactive,   9 idle:batch     hash        tenant that does not -> virtual time
-- ARGV: 1 gateway id, 2 its lease in ms, 3 capacity in prompt tokens, 4 prefix of the wake channels; 5.. per operation
-- Reply: status, waiting, waiting cost, granted, granted cost, live gateways, then request ids of this gateway admitted
local GATEWAYS, ENTRIES, ORDER, GRANTS, META = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local ACTIVE = {interactive = KEYS[6], batch = KEYS[7]}
local IDLE = {interactive = KEYS[8], batch = KEYS[9]}
local GATEWAY, LEASE_MS, CAPACITY, WAKE = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local VIRTUAL_UNIT, BATCH_DIVISOR = 1000, 9
-- Characters of a place in the order.
local PLACE = 26

local clock = redis.call('TIME')
local NOW_US = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local NOW_MS = math.floor(NOW_US / 1000)

-- Lua would write large numbers as 1e+15.
local function text(number) return string.format('%.0f', number) end

local function meta(name) return tonumber(redis.call('HGET', META, name) or 0) end
local function set_meta(name, value) redis.call('HSET', META, name, text(value)) end
local function add_meta(name, value) redis.call('HINCRBY', META, name, text(value)) end

local function line(class, tenant) return class .. '\0' .. tenant .. '\0' end
local function member(id, entry)
  return line(entry[3], entry[2]) .. string.format('%010.0f%016.0f', entry[7] + 2147483648, entry[6]) .. '\0' .. id
end

-- Request id at the head of a tenant's line, or nil.
local function first_of(class, tenant)
  local from = line(class, tenant)
  local found = redis.call('ZRANGEBYLEX', ORDER, '[' .. from, '(' .. class .. '\0' .. tenant .. '\1', 'LIMIT', 0, 1)[1]
  return found and string.sub(found, #from + PLACE + 2)
end

local function entry_of(id)
  local packed = redis.call('HGET', ENTRIES, id)
  return packed and cjson.decode(packed)
end

local function add_entry(id, tenant, class, cost, weight, waited_us, priority)
  local entry = {GATEWAY, tenant, class, cost, weight, NOW_US - waited_us, priority}
  redis.call('HSET', ENTRIES, id, '[' .. cjson.encode(GATEWAY) .. ',' .. cjson.encode(tenant) .. ',"' .. class .. '",'
    .. text(cost) .. ',' .. text(weight) .. ',' .. text(entry[6]) .. ',' .. text(priority) .. ']')
  if not redis.call('ZSCORE', ACTIVE[class], tenant) then
    local before = tonumber(redis.call('HGET', IDLE[class], tenant) or 0)
    redis.call('HDEL', IDLE[class], tenant)
    redis.call('ZADD', ACTIVE[class], text(math.max(before, meta('clock:' .. class))), tenant)
  end
  redis.call('ZADD', ORDER, 0, member(id, entry))
  add_meta('waiting_cost', cost)
end

local function drop_entry(id, entry)
  local tenant, class = entry[2], entry[3]
  redis.call('HDEL', ENTRIES, id)
  redis.call('ZREM', ORDER, member(id, entry))
  add_meta('waiting_cost', -entry[4])
  if not first_of(class, tenant) then
    redis.call('HSET', IDLE[class], tenant, text(redis.call('ZSCORE', ACTIVE[class], tenant)))
    redis.call('ZREM', ACTIVE[class], tenant)
  end
  if redis.call('ZCARD', ACTIVE[class]) == 0 then
    redis.call('DEL', IDLE[class])
    redis.call('HDEL', META, 'clock:' .. class)
  end
end

local function add_grant(id, gateway, cost)
  redis.call('HSET', GRANTS, id, '[' .. cjson.encode(gateway) .. ',' .. text(cost) .. ']')
  add_meta('granted_cost', cost)
end

local function drop_grant(id)
  local packed = redis.call('HGET', GRANTS, id)
  if packed then
    redis.call('HDEL', GRANTS, id)
    add_meta('granted_cost', -cjson.decode(packed)[2])
  end
end

-- Forget an entry or a grant; an unknown id is fine.
local function drop(id)
  drop_grant(id)
  local entry = entry_of(id)
  if entry then drop_entry(id, entry) end
end

-- Forget what a gateway holds, but for the ids in `keep`.
local function drop_of(gateway, keep)
  for _, key in ipairs({ENTRIES, GRANTS}) do
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do
      if not keep[all[i]] and cjson.decode(all[i + 1])[1] == gateway then drop(all[i]) end
    end
  end
end

-- Forget gateways whose lease has lapsed, with all they hold.
local function sweep()
  for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', text(NOW_MS))) do
    redis.call('ZREM', GATEWAYS, gateway)
    drop_of(gateway, {})
  end
end

local function renew_lease() redis.call('ZADD', GATEWAYS, text(NOW_MS + LEASE_MS), GATEWAY) end

-- Request id and entry at the head of one class.
local function head_of(class)
  local tenant = redis.call('ZRANGE', ACTIVE[class], 0, 0)[1]
  if not tenant then return nil end
  local id = first_of(class, tenant)
  return id, entry_of(id)
end

local function head()
  local batch_id, batch = head_of('batch')
  local id, interactive = head_of('interactive')
  if not batch then return id, interactive end
  if not interactive or meta('credit') >= BATCH_DIVISOR * batch[4] then return batch_id, batch end
  return id, interactive
end

local function charge(entry)
  local tenant, class, cost = entry[2], entry[3], entry[4]
  if class == 'batch' then
    set_meta('credit', math.max(0, meta('credit') - BATCH_DIVISOR * cost))
  elseif redis.call('ZCARD', ACTIVE.batch) > 0 then
    add_meta('credit', cost)
  else
    set_meta('credit', 0)
  end
  local start = tonumber(redis.call('ZSCORE', ACTIVE[class], tenant))
  set_meta('clock:' .. class, start)
  redis.call('ZADD', ACTIVE[class], text(start + math.floor(cost * VIRTUAL_UNIT / entry[5])), tenant)
end

-- Admit heads while they fit. Returns this gateway's; others are woken through their channel.
local function admit()
  local own = {}
  while true do
    local id, entry = head()
    if not id then break end
    if redis.call('HLEN', GRANTS) > 0 and meta('granted_cost') + entry[4] > CAPACITY then break end
    charge(entry)
    drop_entry(id, entry)
    add_grant(id, entry[1], entry[4])
    if entry[1] == GATEWAY then
      own[#own + 1] = id
    else
      redis.call('PUBLISH', WAKE .. entry[1], id)
    end
  end
  return own
end

local function reply(status, own)
  local figures = {status, redis.call('HLEN', ENTRIES), meta('waiting_cost'), redis.call('HLEN', GRANTS),
    meta('granted_cost'), redis.call('ZCARD', GATEWAYS)}
  for _, id in ipairs(own) do figures[#figures + 1] = id end
  return figures
end

-- A gateway without a lease is one that this server has forgotten: it must assert what it holds first.
local function known()
  sweep()
  if not redis.call('ZSCORE', GATEWAYS, GATEWAY) then return false end
  renew_lease()
  return true
end

