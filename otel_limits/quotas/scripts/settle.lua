-- Count what a call really took, and give back what was set aside for it.
-- KEYS: done; expired; the operation as earlier versions noted it; then for each charge: its two buckets,
--       each with its leases.
-- ARGV: operation id, its place in done, how long to remember, channel for what becomes free; then for
--       each charge: amount, expiry, known, unit, "QUOTA KEY".

local operation = ARGV[1]
local is_done = redis.call('HGET', KEYS[1], ARGV[2]) == 'settled -'
  or string.sub(redis.call('GET', KEYS[3]) or '', 1, 7) == 'settled'

local now = now_ms()
local reply = { 'settled', whole(now), '-' }
for n = 1, (#KEYS - 3) / 4 do
  local key, arg = 4 * n - 1, 5 * n - 1
  local names = { KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4] }
  local count = open(names, ARGV[arg + 4], operation)
  if not is_done then
    restore(count, ARGV[arg + 3])
    local taken, doubtful = count.used + count.reserved, count.doubtful
    if count.lease then
      release(count, count.lease)
      redis.call('HDEL', count.bucket, 'lease:' .. operation)
      redis.call('ZREM', count.leases, operation)
    else
      redis.call('ZREM', KEYS[2], operation)
    end
    count.used = count.used + ARGV[arg + 1]
    save(count, ARGV[arg + 2])
    local is_easier = count.used + count.reserved < taken or count.doubtful < doubtful
      or count.reserved == 0
    if count.waited > now and is_easier then
      -- Who may use no channels must be able to settle all the same.
      redis.pcall('PUBLISH', ARGV[4], ARGV[arg + 5])
    end
  end
  table.insert(reply, whole(count.used))
  table.insert(reply, whole(count.reserved))
  table.insert(reply, '0')
end

if not is_done then
  remember(KEYS[1], ARGV[2], 'settled -', ARGV[3])
end
return table.concat(reply, ' ')
