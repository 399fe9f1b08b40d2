-- Renew the leases of an operation.
-- KEYS: run, then for each count: its bucket and leases.
-- ARGV: operation ID, lease, name of the run, whether to reserve again what is missing; then for each
--       count: amount, certain, whether to charge it if it expires, and expiry in one text.

local operation, now, run = ARGV[1], now_ms(), current(KEYS[1])
if ARGV[3] ~= '' and ARGV[3] ~= run then
  return 'lost ' .. whole(now) .. ' - 0'
end
for n = 1, (#KEYS - 1) / 2 do
  local leases, ends = KEYS[2 * n + 1], whole(now + ARGV[2])
  local held = tonumber(redis.call('ZSCORE', leases, operation) or 0)
  local count = ARGV[4] == '1' and open(run, KEYS[2 * n], leases, operation)
  if count and not count.lease and count.lost == 0 then
    -- Lost by a restart, and not used by another call: none was admitted since. What was charged instead of
    -- it stays charged.
    local amount, certain, charged, expires = string.match(ARGV[n + 4], '^(%d+) ([01]) ([01]) (%d+)$')
    amount = wanted(count, amount, certain)
    take(count, operation, amount, certain, amount * charged, ends, expires)
  elseif held > now then
    -- Only an unexpired lease: another call may use the slot by now.
    redis.call('ZADD', leases, 'XX', ends, operation)
  end
end
return 'renewed ' .. whole(now) .. ' - 0'
