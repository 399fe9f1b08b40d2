-- Tell how counts stand.
-- KEYS: expired, then for each count: bucket, leases, grants. ARGV: for each count: the amount of its quota.

local now = now_ms()
local reply = { 'looked', whole(now), '-' }
for n = 1, (#KEYS - 1) / 3 do
  local bucket, leases, grants = KEYS[3 * n - 1], KEYS[3 * n], KEYS[3 * n + 1]
  void(bucket, leases, KEYS[1], now)
  table.insert(reply, whole(field(bucket, 'used')))
  table.insert(reply, whole(field(bucket, 'reserved')))
  table.insert(reply, whole(ARGV[n] + granted(grants, now)))
end
return table.concat(reply, ' ')
