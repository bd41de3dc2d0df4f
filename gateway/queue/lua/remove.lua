-- Forget waiting requests (cancelled) or grants (released), then admit whoever may go. KEYS and ARGV 1..4: prelude.lua
-- ARGV: 5.. request ids
-- Status: ok, lost (assert first)
if not known() then return reply('lost', {}) end
for i = 5, #ARGV do drop(ARGV[i]) end
return reply('ok', admit())
