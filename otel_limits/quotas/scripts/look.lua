-- Read the state of counts.
-- KEYS: run, expired, living, sharing, then the bucket of each count, then the leases of each, then its grants.
-- ARGV: worker ID, or empty; how long it counts as a worker; name of the run; how long that is remembered;
--       then for successive counts that have them in common, in one text: their number, unit, amount,
--       milliseconds in which a token bucket flows back (0 for other counts) and burst.
-- The state of a count has what is granted in the place of its limit, or "=LIMIT" if the amount of the
-- policy does not apply: because another is set, or because it depends on the plan of a call; and for what a
-- token bucket holds.

local now, run = now_ms(), current(KEYS[1])
if ARGV[3] ~= '' and ARGV[3] ~= run then
  return 'lost ' .. whole(now) .. ' - 0'
end

-- Note a worker, and return how many there are.
local function enlist(workers)
  redis.call('ZADD', workers, whole(now), ARGV[1])
  redis.call('ZREMRANGEBYSCORE', workers, '-inf', whole(now - ARGV[2]))
  redis.call('PEXPIRE', workers, ARGV[2])
  return whole(redis.call('ZCARD', workers))
end

local living, sharing = '0', '0'
if ARGV[1] ~= '' then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  living = enlist(KEYS[3])
  if #KEYS > 4 then
    sharing = enlist(KEYS[4])
  end
end

-- Few keys have grants: whether any of them does is cheaper to read than the grants of each.
local size = (#KEYS - 4) / 3
local are_granted = size > 0 and redis.call('EXISTS', unpack(KEYS, 2 * size + 5)) > 0

-- Return what is used and reserved of a count, and when it is full again if it is a token bucket.
local function opened(bucket, leases, unit)
  local count = open(run, bucket, leases)
  expire(count, KEYS[2], now, unit)
  local full_at = count.amount and whole(room_at(count, count.used + count.reserved)) or '0'
  return whole(count.used), whole(count.reserved), full_at
end

-- Locals and texts, as globals and numbers would take a tenth of the time.
local call, keys, now_text, n = redis.call, KEYS, whole(now), 0
local reply, blocked = { 'looked', now_text, '-', sharing .. '/' .. living }, {}
for at = 5, #ARGV do
  local number, unit, amount, per, burst = string.match(ARGV[at], '^(%d+) (%S+) (%d+) (%d+) (%d+)$')
  for _ = 1, tonumber(number) do
    n = n + 1
    local bucket, leases = keys[n + 4], keys[n + 4 + size]
    local found = call('HMGET', bucket, 'used', 'reserved', 'reset', 'limit')
    local used, reserved, full_at = found[1] or '0', found[2] or '0', '0'
    -- Opening a count costs much more than to see that there is nothing to do.
    if found[2] and (per ~= '0' or (reserved ~= '0' and (call('HGET', bucket, 'run') ~= run
        or #call('ZRANGEBYSCORE', leases, '-inf', now_text, 'LIMIT', 0, 1) > 0))) then
      used, reserved, full_at = opened(bucket, leases, unit)
    end
    local planned, more, block, set = found[4], '0', nil, nil
    if are_granted then
      more, block, set = granted(keys[n + 4 + 2 * size], unit, now)
    end
    if block then
      blocked[#blocked + 1] = (n - 1) .. '=' .. block
    end
    if per ~= '0' or set or planned then
      local limit = (set or tonumber(planned or amount)) + more
      more = '=' .. whole(capacity(limit, tonumber(per), tonumber(burst)))
    end
    reply[n + 4] = used .. ' ' .. reserved .. ' ' .. more .. ' ' .. (found[3] or '-') .. ' ' .. full_at
  end
end
if #blocked > 0 then
  reply[3] = table.concat(blocked, ',')
end
return table.concat(reply, ' ')
