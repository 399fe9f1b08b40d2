-- Count what a call really took, and give back what was set aside for it.
-- KEYS: done; expired; the operation as earlier versions noted it; then for each charge: its two buckets,
--       each with its leases.
-- ARGV: operation id, its place in done, how long to remember, channel for what becomes free; then for
--       each charge: amount, expiry and known in one text; unit; "QUOTA KEY".

local operation = ARGV[1]
local counts, is_reserved = {}, #KEYS > 3
for n = 1, (#KEYS - 3) / 4 do
  local key = 4 * n - 1
  local names = { KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4] }
  counts[n] = open(names, ARGV[3 * n + 3], operation)
  is_reserved = is_reserved and counts[n].lease
end
local is_done = redis.call('HGET', KEYS[1], ARGV[2]) == 'settled -'
-- An earlier version has not settled what still holds all that was set aside for it.
if not is_done and not is_reserved then
  is_done = string.sub(redis.call('GET', KEYS[3]) or '', 1, 7) == 'settled'
end

local now = now_ms()
local reply = { 'settled', whole(now), '-', '0' }
for n, count in ipairs(counts) do
  if not is_done then
    local amount, expires, known = string.match(ARGV[3 * n + 2], '^(%S+) (%S+) (%S+)$')
    restore(count, known)
    local taken, doubtful = count.used + count.reserved, count.doubtful
    if count.lease then
      release(count, count.lease)
      redis.call('HDEL', count.bucket, 'lease:' .. operation)
      redis.call('ZREM', count.leases, operation)
    else
      redis.pcall('ZREM', KEYS[2], operation)
    end
    count.used = count.used + amount
    save(count, expires)
    local is_easier = count.used + count.reserved < taken or count.doubtful < doubtful
      or count.reserved == 0
    if count.waited > now and is_easier then
      -- Who may use no channels must be able to settle all the same.
      redis.pcall('PUBLISH', ARGV[4], ARGV[3 * n + 4])
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
