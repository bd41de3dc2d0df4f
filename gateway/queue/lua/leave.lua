-- Forget this gateway with all it holds (it stops), then admit others. KEYS and ARGV 1..4: prelude.lua
sweep()
redis.call('ZREM', GATEWAYS, GATEWAY)
drop_of(GATEWAY, {})
return reply('ok', admit())
