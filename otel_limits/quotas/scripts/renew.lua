-- Let the leases of an operation last as long as new ones.
-- KEYS: for each count: its two buckets, each with its leases. ARGV: operation id, lease; then for each
--       count: unit.

local operation, now = ARGV[1], now_ms()
for n = 1, #KEYS / 4 do
  local names = { KEYS[4 * n - 3], KEYS[4 * n - 2], KEYS[4 * n - 1], KEYS[4 * n] }
  local count = open(names, ARGV[n + 2], operation)
  local ends = tonumber(redis.call('ZSCORE', count.leases, operation) or 0)
  -- One that has ended may be somebody else's place by now.
  if ends > now then
    redis.call('ZADD', count.leases, 'XX', whole(now + ARGV[2]), operation)
  end
end
return 'renewed ' .. whole(now) .. ' - 0'
