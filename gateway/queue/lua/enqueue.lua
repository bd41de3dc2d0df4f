-- Add one waiting request, then admit whoever may go. KEYS and ARGV 1..4: prelude.lua
-- ARGV: 5 request id, 6 tenant, 7 class, 8 cost, 9 weight, 10 waited so far (us), 11 priority, 12 bound on waiting requests
-- Status: ok, full (not taken), lost (assert first)
local id = ARGV[5]
if not known() then return reply('lost', {}) end
if redis.call('HEXISTS', GRANTS, id) == 1 then return reply('ok', {id}) end
if redis.call('HEXISTS', ENTRIES, id) == 0 then
  add_entry(id, ARGV[6], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]))
end
local own = admit()
local entry = entry_of(id)
if entry and redis.call('HLEN', ENTRIES) > tonumber(ARGV[12]) then
  drop_entry(id, entry)
  return reply('full', own)
end
return reply('ok', own)
