-- Tell how counts stand.
-- KEYS: for each count: bucket, leases, grants. ARGV: for each count: the amount of its quota.

local now = now_ms()
local reply = {}
for n = 1, #KEYS / 3 do
  local bucket, leases, grants = KEYS[3 * n - 2], KEYS[3 * n - 1], KEYS[3 * n]
  for _, operation in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now))) do
    drop(bucket, leases, operation)
  end
  table.insert(reply, whole(field(bucket, 'used')))
  table.insert(reply, whole(field(bucket, 'reserved')))
  table.insert(reply, whole(ARGV[n] + granted(grants, now)))
end
return table.concat(reply, ' ')
