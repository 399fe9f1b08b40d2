-- Read the state of counts.
-- KEYS: run, expired, living, sharing, then for each count: its bucket, leases and grants.
-- ARGV: worker ID, or empty; how long it counts as a worker; name of the run; how long that is remembered;
--       then for each count: its unit, amount, milliseconds in which a token bucket flows back (0 for other
--       counts) and its burst, in one text.
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
local grants = {}
for n = 7, #KEYS, 3 do
  grants[#grants + 1] = KEYS[n]
end
local are_granted = #grants > 0 and redis.call('EXISTS', unpack(grants)) > 0

local reply, blocked = { 'looked', whole(now), '-', sharing .. '/' .. living }, {}
for n = 1, #grants do
  local unit, amount, per, burst = string.match(ARGV[n + 4], '^(%S+) (%d+) (%d+) (%d+)$')
  local found = redis.call('HMGET', KEYS[3 * n + 2], 'used', 'reserved', 'reset', 'limit', 'pace')
  local full_at = '0'
  if found[5] or (found[2] and found[2] ~= '0') then
    local count = open(run, KEYS[3 * n + 2], KEYS[3 * n + 3])
    void(count, KEYS[2], now, unit)
    found[1], found[2] = whole(count.used), whole(count.reserved)
    full_at = count.amount and whole(room_at(count, count.used + count.reserved)) or '0'
  end
  local more, block, set = 0, nil, nil
  if are_granted then
    more, block, set = granted(grants[n], unit, now)
  end
  if block then
    blocked[#blocked + 1] = (n - 1) .. '=' .. block
  end
  if per ~= '0' or set or found[4] then
    local limit = (set or tonumber(found[4] or amount)) + more
    more = '=' .. whole(capacity(limit, tonumber(per), tonumber(burst)))
  end
  local size = 5 * n - 1
  reply[size + 1], reply[size + 2] = found[1] or '0', found[2] or '0'
  reply[size + 3], reply[size + 4], reply[size + 5] = more, found[3] or '-', full_at
end
if #blocked > 0 then
  reply[3] = table.concat(blocked, ',')
end
return table.concat(reply, ' ')
