-- Restore counts from what a worker, or a ledger, knows of earlier runs of the server.
-- KEYS: run, then for each count: its bucket and leases.
-- ARGV: for each count: used, time and ID of its last reset or "-", expiry, and the usage that was seen here
--       by who restores it, or "-".
-- Returns the name of the run.

local run = current(KEYS[1])
for n = 1, #ARGV do
  local count = open(run, KEYS[2 * n], KEYS[2 * n + 1])
  local used, reset, expires, seen = string.match(ARGV[n], '^(%d+) (%S+) (%d+) (%S+)$')
  restore(count, tonumber(used), reset ~= '-' and reset or '', tonumber(seen) or count.base)
  save(count, expires)
end
return run
