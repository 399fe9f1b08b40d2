-- Count what a call really took, and give back what was set aside for it.
-- KEYS: operation, then for each charge: its two buckets, each with its leases.
-- ARGV: operation id, how long to remember; then for each charge: amount, expiry, known, unit.

local earlier = redis.call('GET', KEYS[1])
if earlier and string.sub(earlier, 1, 7) == 'settled' then
  return earlier
end

local operation, remember_ms = ARGV[1], ARGV[2]
local reply = { 'settled', whole(now_ms()), '-' }
for n = 1, (#KEYS - 1) / 4 do
  local key, arg = 4 * n - 3, 4 * n - 2
  local names = { KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4] }
  local count = open(names, ARGV[arg + 4], operation)
  restore(count, ARGV[arg + 3])
  if count.lease then
    release(count, count.lease)
    redis.call('HDEL', count.bucket, 'lease:' .. operation)
    redis.call('ZREM', count.leases, operation)
  end
  count.used = count.used + ARGV[arg + 1]
  save(count, ARGV[arg + 2])
  table.insert(reply, whole(count.used))
  table.insert(reply, whole(count.reserved))
  table.insert(reply, '0')
end

local answer = table.concat(reply, ' ')
redis.call('SET', KEYS[1], answer, 'PX', remember_ms)
return answer
