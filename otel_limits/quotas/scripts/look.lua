-- Tell how counts stand.
-- KEYS: expired, then for each count: bucket, leases, grants. ARGV: for each count: the amount of its quota.

local now = now_ms()
local reply, blocked = { 'looked', whole(now), '-' }, {}
for n = 1, (#KEYS - 1) / 3 do
  local bucket, leases, grants = KEYS[3 * n - 1], KEYS[3 * n], KEYS[3 * n + 1]
  void(bucket, leases, KEYS[1], now)
  table.insert(reply, whole(field(bucket, 'used')))
  table.insert(reply, whole(field(bucket, 'reserved')))
  local more, block = granted(grants, now)
  table.insert(reply, whole(ARGV[n] + more))
  if block then
    table.insert(blocked, (n - 1) .. '=' .. block)
  end
end
reply[3] = #blocked > 0 and table.concat(blocked, ',') or '-'
return table.concat(reply, ' ')
