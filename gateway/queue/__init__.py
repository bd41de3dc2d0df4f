"""Admission: who of the waiting requests may go to the prefill workers next.

`interface` is what the dispatcher sees; `admission` keeps this gateway's requests and talks to one of two backends of
the same policy (`fair`): `shared` (Lua in Redis, all gateways together) or `local` (this gateway alone, while Redis is
away).
"""
