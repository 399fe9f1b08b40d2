-- Read the state of counts.
-- KEYS: run, expired, living, sharing, then for each count: its bucket, leases and grants.
-- ARGV: worker ID, or empty; how long it counts as a worker; name of the run; how long that is remembered;
--       then for each count: its unit.
-- The state of a count has what is granted in the place of its limit, or "=LIMIT" if the amount of the
-- policy does not apply: because another is set, or because it depends on the plan of a call.

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
  local found = redis.call('HMGET', KEYS[3 * n + 2], 'used', 'reserved', 'reset', 'limit')
  if found[2] and found[2] ~= '0' then
    local count = open(run, KEYS[3 * n + 2], KEYS[3 * n + 3])
    void(count, KEYS[2], now, ARGV[n + 4])
    found[1], found[2] = whole(count.used), whole(count.reserved)
  end
  local more, block, set = 0, nil, nil
  if are_granted then
    more, block, set = granted(grants[n], ARGV[n + 4], now)
  end
  if block then
    blocked[#blocked + 1] = (n - 1) .. '=' .. block
  end
  if set or found[4] then
    more = '=' .. whole((set or found[4]) + more)
  end
  local size = 4 * n
  reply[size + 1], reply[size + 2] = found[1] or '0', found[2] or '0'
  reply[size + 3], reply[size + 4] = more, found[3] or '-'
end
if #blocked > 0 then
  reply[3] = table.concat(blocked, ',')
end
return table.concat(reply, ' ')
