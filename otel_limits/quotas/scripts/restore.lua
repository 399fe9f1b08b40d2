-- Restore counts from what a worker, or a ledger, knows of earlier runs of the server.
-- KEYS: run, then for each count: its bucket, leases and index.
-- ARGV: for each count: used, time and ID of its last reset or "-", expiry, the usage that was seen here
--       by who restores it, or "-", end of its window, and whether it is a token bucket; its index member.
-- Returns the name of the run.

local run, now = current(KEYS[1]), now_ms()
for n = 1, #ARGV / 2 do
  local count = open(run, KEYS[3 * n - 1], KEYS[3 * n])
  local used, reset, expires, seen, finish, flows =
    string.match(ARGV[2 * n - 1], '^(%d+) (%S+) (%d+) (%S+) (%d+) ([01])$')
  if flows == '1' and not count.flowed then
    count.flowed, count.rest, count.out = now, 0, 0
  end
  restore(count, tonumber(used), reset ~= '-' and reset or '', tonumber(seen) or count.base)
  save(count, expires)
  -- pcall, because the index is only for display.
  redis.pcall('ZADD', KEYS[3 * n + 1], 'GT', finish, ARGV[2 * n])
  keep(KEYS[3 * n + 1], expires, now)
end
return run
