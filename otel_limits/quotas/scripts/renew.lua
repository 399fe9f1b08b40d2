-- Renew the leases of an operation.
-- KEYS: for each count: its bucket and leases. ARGV: operation ID, lease.

local operation, now = ARGV[1], now_ms()
for n = 2, #KEYS, 2 do
  local leases = KEYS[n]
  local ends = tonumber(redis.call('ZSCORE', leases, operation) or 0)
  -- Only unexpired leases: another call may use the slot by now.
  if ends > now then
    redis.call('ZADD', leases, 'XX', whole(now + ARGV[2]), operation)
  end
end
return 'renewed ' .. whole(now) .. ' - 0'
