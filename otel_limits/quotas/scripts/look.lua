-- Tell how counts stand.
-- KEYS: expired, then for each count: its two buckets, each with its leases; grants.
-- ARGV: for each count: the amount of its quota, its unit.

local now = now_ms()
local reply, blocked = { 'looked', whole(now), '-' }, {}
for n = 1, (#KEYS - 1) / 5 do
  local key, unit = 5 * n - 4, ARGV[2 * n]
  local count = open({ KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4] }, unit)
  void(count, KEYS[1], now)
  table.insert(reply, whole(count.used))
  table.insert(reply, whole(count.reserved))
  local more, block = granted(KEYS[key + 5], unit, now)
  table.insert(reply, whole(ARGV[2 * n - 1] + more))
  if block then
    table.insert(blocked, (n - 1) .. '=' .. block)
  end
end
reply[3] = #blocked > 0 and table.concat(blocked, ',') or '-'
return table.concat(reply, ' ')
