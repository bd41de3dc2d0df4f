-- Make this gateway's part equal to what it holds and renew its lease, then admit. KEYS and ARGV 1..4: prelude.lua
-- ARGV: 5 JSON {waiting: [[id, tenant, class, cost, weight, waited us, priority], ...], granted: [[id, cost], ...]}
-- What was admitted before stays so. Status: ok; the ids are those of `waiting` that are admitted now.
local held = cjson.decode(ARGV[5])
sweep()
renew_lease()
local keep = {}
for _, waiting in ipairs(held.waiting) do keep[waiting[1]] = true end
for _, granted in ipairs(held.granted) do keep[granted[1]] = true end
drop_of(GATEWAY, keep)
for _, granted in ipairs(held.granted) do
  if redis.call('HEXISTS', GRANTS, granted[1]) == 0 then
    drop(granted[1])
    add_grant(granted[1], GATEWAY, granted[2])
  end
end
for _, waiting in ipairs(held.waiting) do
  local id = waiting[1]
  if redis.call('HEXISTS', GRANTS, id) == 0 and redis.call('HEXISTS', ENTRIES, id) == 0 then
    add_entry(id, waiting[2], waiting[3], waiting[4], waiting[5], waiting[6], waiting[7])
  end
end
admit()
local own = {}
for _, waiting in ipairs(held.waiting) do
  if redis.call('HEXISTS', GRANTS, waiting[1]) == 1 then own[#own + 1] = waiting[1] end
end
return reply('ok', own)
