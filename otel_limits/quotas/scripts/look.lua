-- Read the state of counts.
-- KEYS: expired, workers, then for each count: its bucket, leases and grants.
-- ARGV: worker ID, or empty; how long it counts as a worker; then for each count: the amount of its
--       quota, its unit.

local now = now_ms()
local workers = 0
if ARGV[1] ~= '' then
  redis.call('ZADD', KEYS[2], whole(now), ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now - ARGV[2]))
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  workers = redis.call('ZCARD', KEYS[2])
end

local reply, blocked = { 'looked', whole(now), '-', whole(workers) }, {}
for n = 1, (#KEYS - 2) / 3 do
  local key, unit = 3 * n - 1, ARGV[2 * n + 2]
  local count = open(KEYS[key + 1], KEYS[key + 2])
  void(count, KEYS[1], now, unit)
  table.insert(reply, whole(count.used))
  table.insert(reply, whole(count.reserved))
  local more, block = granted(KEYS[key + 3], unit, now)
  table.insert(reply, whole(ARGV[2 * n + 1] + more))
  if block then
    table.insert(blocked, (n - 1) .. '=' .. block)
  end
end
reply[3] = #blocked > 0 and table.concat(blocked, ',') or '-'
return table.concat(reply, ' ')
