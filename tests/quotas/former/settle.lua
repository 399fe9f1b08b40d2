-- Count what a call really took, and give back what was set aside for it.
-- KEYS: operation, then for each charge: bucket, leases.
-- ARGV: operation id, how long to remember; then for each charge: amount, expiry, known.

local earlier = redis.call('GET', KEYS[1])
if earlier and string.sub(earlier, 1, 7) == 'settled' then
  return earlier
end

local operation, remember_ms = ARGV[1], ARGV[2]
local reply = { 'settled', whole(now_ms()), '-' }
for n = 1, (#KEYS - 1) / 2 do
  local bucket, leases = KEYS[2 * n], KEYS[2 * n + 1]
  local amount, expires, known = ARGV[3 * n], ARGV[3 * n + 1], ARGV[3 * n + 2]
  restore(bucket, known, expires)
  drop(bucket, leases, operation)
  local used = redis.call('HINCRBY', bucket, 'used', amount)
  redis.call('PEXPIREAT', bucket, expires)
  table.insert(reply, whole(used))
  table.insert(reply, whole(field(bucket, 'reserved')))
  table.insert(reply, '0')
end

local answer = table.concat(reply, ' ')
redis.call('SET', KEYS[1], answer, 'PX', remember_ms)
return answer
