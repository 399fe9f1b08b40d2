-- Count the actual usage of a call and release its reservation.
-- KEYS: done, expired; then for each charge: its bucket and leases.
-- ARGV: operation ID, its field in done, retention, channel for releases; then for each charge: amount,
--       expiry and known in one text; "QUOTA KEY".

local operation = ARGV[1]
local counts = {}
-- All are read before any is changed: data of another program aborts the script.
for n = 1, #KEYS / 2 - 1 do
  counts[n] = open(KEYS[2 * n + 1], KEYS[2 * n + 2], operation)
end
local is_done = redis.call('HGET', KEYS[1], ARGV[2]) == 'settled -'
local now = now_ms()
local reply = { 'settled', whole(now), '-', '0' }
for n, count in ipairs(counts) do
  if not is_done then
    local amount, expires, known = string.match(ARGV[2 * n + 3], '^(%S+) (%S+) (%S+)$')
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
      -- pcall, because users without channel permissions must be able to settle.
      redis.pcall('PUBLISH', ARGV[4], ARGV[2 * n + 4])
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
