-- Count the actual usage of a call and release its reservation.
-- KEYS: run, done, expired; then for each charge: its bucket, leases, history and grants.
-- ARGV: operation ID, its field in done, retention, name of the run, channel for releases, whether the call
--       ended in an earlier run; then for each
--       charge: amount, expiry, known, and model to whose last calls it is added, or "-", in one text;
--       "QUOTA KEY".

local operation, now, run = ARGV[1], now_ms(), current(KEYS[1])
if ARGV[4] ~= '' and ARGV[4] ~= run then
  return 'lost ' .. whole(now) .. ' - 0'
end
-- Remove the needs of a call that no longer waits; return whether there was any.
local function withdraw(grants, operation, now)
  local found = 0
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', grants, '(' .. whole(now), '+inf')) do
    if string.match(each, '^need:%d+:%d+:([^:]+):') == operation then
      found = found + redis.call('ZREM', grants, each)
    end
  end
  return found > 0
end

local counts = {}
-- All are read before any is changed: data of another program aborts the script.
for n = 1, (#KEYS - 3) / 4 do
  counts[n] = open(run, KEYS[4 * n], KEYS[4 * n + 1], operation)
  redis.call('ZCARD', KEYS[4 * n + 3])
end
local is_done = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^settled ')
local is_earlier = ARGV[6] == '1'
local reply = { 'settled', whole(now), '-', '0' }
for n, count in ipairs(counts) do
  if not is_done then
    local amount, expires, known, model = string.match(ARGV[2 * n + 5], '^(%S+) (%S+) (%S+) (%S+)$')
    resume(count, known)
    local taken, doubtful = count.used + count.reserved, count.doubtful
    local is_withdrawn = false
    if count.lease then
      release(count, count.lease, amount)
      redis.call('HDEL', count.bucket, 'lease:' .. operation)
      redis.call('ZREM', count.leases, operation)
    else
      redis.pcall('ZREM', KEYS[3], operation)
      is_withdrawn = withdraw(KEYS[4 * n + 3], operation, now)
      -- The actual usage replaces what was charged when the lease expired.
      local more = amount - count.lost
      count.used = count.used + (count.amount and math.max(0, more) or more)
    end
    if count.lost > 0 then
      redis.call('HDEL', count.bucket, 'lost:' .. operation)
      if is_earlier then
        note(count, 'base', whole(math.max(0, count.base - count.lost)))
      end
    end
    if model ~= '-' then
      note_call(KEYS[4 * n + 2], model, amount, expires, now)
    end
    save(count, expires)
    local is_easier = count.used + count.reserved < taken or count.doubtful < doubtful
      or count.reserved == 0
    if is_withdrawn or (count.waited > now and is_easier) then
      -- pcall, because users without channel permissions must be able to settle.
      redis.pcall('PUBLISH', ARGV[5], ARGV[2 * n + 6])
    end
  end
  report(reply, count, '0')
end

if not is_done then
  remember(KEYS[2], ARGV[2], is_earlier and 'settled ' .. run or 'settled -', ARGV[3])
end
return table.concat(reply, ' ')
