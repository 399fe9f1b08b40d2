-- Reserve the worst case of a call in all of its counts, or in none.
-- KEYS: run, done, expired, kills, then for each demand: its bucket, leases, grants, index, history.
-- ARGV: operation ID, its field in done, retention, name of the run, how long the call has waited; then for each demand: its numbers, in
--       one text for fast parsing: amount, limit, start and end of the window, expiry of the bucket,
--       enforced, certain, alone, known, maximum wait of the client, lease, whether to
--       keep the limit, milliseconds in which a token bucket flows back (0 for other counts), its burst (0 for
--       the default), model by whose last calls it is charged if its lease expires, or "-"; its unit; its
--       index member.
-- Returns status, time, unmet demands, time of the last kill, and the state of each count.
-- An unmet demand is "POSITION", followed by "=UNTIL:REASON" if the key is blocked, or by "@TIME" of
-- the first lease expiry of that count, or when enough has flowed back.

local NUMBERS = '^' .. string.rep('(%S+) ', 14) .. '(%S+)$'
local MOST_NEEDS, NEED_MS = 10, 10000
local operation = ARGV[1]
local now = now_ms()
-- A repeated operation gets its remembered result and the current counts.
local earlier, already = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%a+) (.*)$')
already = earlier == 'settled' and '-' or already
local run, opens = current(KEYS[1])
local is_known, is_open = ARGV[4] == '' or ARGV[4] == run, ARGV[4] == '' or (opens and now >= opens)

-- Let later calls leave room for this one, or no longer.
local function leave_room(demand, this, is_waiting, now)
  local oldest, member = {}, nil
  if is_waiting then
    member = string.format('need:%d:%014d:%s:%s', demand.needed, this.since, this.operation, demand.unit)
    for _, need in ipairs(demand.needs) do
      oldest[#oldest + 1] = need.operation ~= this.operation and need or nil
    end
    table.sort(oldest, is_older)
    if #oldest >= MOST_NEEDS and is_older(oldest[MOST_NEEDS], this) then
      member = nil
    elseif oldest[MOST_NEEDS] then
      redis.call('ZREM', demand.grants, oldest[MOST_NEEDS].member)
    end
  end
  for _, need in ipairs(demand.needs) do
    if need.operation == this.operation and need.member ~= member then
      redis.call('ZREM', demand.grants, need.member)
    end
  end
  if member then
    redis.call('ZADD', demand.grants, whole(now + NEED_MS), member)
    keep(demand.grants, whole(now + NEED_MS), now)
    -- Those of killed workers. Expired grants stay, in case the clock is set back.
    for _, each in ipairs(redis.call('ZRANGEBYSCORE', demand.grants, '-inf', whole(now))) do
      if string.sub(each, 1, 5) == 'need:' then
        redis.call('ZREM', demand.grants, each)
      end
    end
  end
end

local demands = {}
for n = 1, (#KEYS - 4) / 5 do
  local key, arg = 5 * n - 1, 3 * n + 2
  local amount, limit, start, finish, expires, enforced, certain, alone, known, waits, lease, planned,
    per, burst, model = string.match(ARGV[arg + 1], NUMBERS)
  if not earlier and (now < tonumber(start) or now >= tonumber(finish)) then
    return 'elsewhere ' .. whole(now) .. ' - 0'
  end
  if not is_known then
    return 'lost ' .. whole(now) .. ' - 0'
  elseif enforced == '1' and not is_open then
    return 'closed ' .. whole(now) .. ' - 0'
  end
  demands[n] = {
    bucket = KEYS[key + 1], leases = KEYS[key + 2], grants = KEYS[key + 3], index = KEYS[key + 4],
    history = KEYS[key + 5], model = model,
    amount = tonumber(amount), limit = tonumber(limit), finish = finish, expires = expires,
    enforced = enforced == '1', certain = certain, alone = alone == '1', known = known,
    kept_limit = planned == '1' and limit, per = tonumber(per), burst = tonumber(burst),
    waits = tonumber(waits), lease = tonumber(lease), unit = ARGV[arg + 2], member = ARGV[arg + 3],
  }
end

local this = { operation = operation, since = now - ARGV[5] }
for _, demand in ipairs(demands) do
  local count = open(run, demand.bucket, demand.leases, operation)
  demand.count = count
  resume(count, demand.known)
  local more, block, set, needs = granted(demand.grants, demand.unit, now)
  demand.block, demand.whole, demand.needs = block, (set or demand.limit) + more, needs
  demand.limit = capacity(demand.whole, demand.per, demand.burst)
  if demand.per > 0 and not earlier and (not count.amount or count.is_set_back) then
    -- Also if it is refused: the flow begins now.
    pace(count, demand.whole, demand.per, now)
    if count.exists then
      save(count, demand.expires)
    end
  end
  expire(count, KEYS[3], now, demand.unit)
  shorten(count, now, demand.lease)
  demand.amount = wanted(count, demand.amount, demand.certain)
  for _, need in ipairs(needs) do
    -- In all counts the same, so that no two calls leave room for each other.
    this.since = need.operation == operation and need.since or this.since
  end
end

local unmet, refused, waits = {}, false, true
for n, demand in ipairs(demands) do
  local count, ahead = demand.count, 0
  for _, need in ipairs(demand.needs) do
    if demand.enforced and is_older(need, this) then
      ahead = ahead + math.min(need.amount, demand.limit)
    end
  end
  -- A call above the burst goes out when the bucket is full.
  demand.needed = demand.per > 0 and math.min(demand.amount, demand.limit) or demand.amount
  -- An estimate above the whole limit could never be met: admit one such call at a time.
  local lone = demand.per == 0 and demand.alone and demand.amount > demand.limit and count.reserved == 0
    and count.used < demand.limit and ahead == 0
  local lacking = count.used + count.reserved + ahead + demand.needed - demand.limit
  if demand.block or (lacking > 0 and not lone) then
    demand.is_unmet = true
    local first = demand.enforced and redis.call('ZRANGE', count.leases, 0, 0, 'WITHSCORES')[2]
    if demand.enforced and count.amount then
      first = math.min(first or math.huge, room_at(count, lacking))
    end
    local why = demand.block and '=' .. demand.block or first and '@' .. whole(first) or ''
    table.insert(unmet, (n - 1) .. why)
    -- A missing count has no reservations to be released.
    if demand.waits > 0 and count.exists and now + demand.waits > count.waited then
      redis.call('HSET', count.bucket, 'waited', whole(now + demand.waits))
    end
    refused = refused or demand.enforced
    waits = waits and (not demand.enforced or (demand.waits > 0 and not demand.block))
  end
end

if not earlier then
  for _, demand in ipairs(demands) do
    leave_room(demand, this, refused and waits and demand.is_unmet and demand.enforced, now)
  end
end

local short = already or (#unmet > 0 and table.concat(unmet, ',') or '-')
-- For subscribed processes that miss messages: they then read the kills. pcall, because data of another
-- program under this name must not block admissions.
local kill = redis.pcall('ZRANGE', KEYS[4], -1, -1, 'WITHSCORES')[2]
local status = earlier or (refused and 'refused' or 'admitted')
local reply = { status, whole(now), short, kill and whole(kill) or '0' }
for _, demand in ipairs(demands) do
  local count = demand.count
  if not earlier and not refused then
    local is_kept = count.kept >= tonumber(demand.expires)
    if demand.per > 0 then
      pace(count, demand.whole, demand.per, now)
    end
    if demand.kept_limit then
      note(count, 'limit', demand.kept_limit)
    end
    local lost = charged_if_lost(demand.history, demand.model, demand.amount)
    take(count, operation, demand.amount, demand.certain, lost, now + demand.lease, demand.expires,
      'at', whole(now))
    -- The index is updated once per window. pcall, because it is only for display: data of another
    -- program under its name must not block admissions.
    if not count.at or not is_kept then
      redis.pcall('ZADD', demand.index, 'GT', demand.finish, demand.member)
      redis.pcall('ZREMRANGEBYSCORE', demand.index, '-inf', whole(now))
      keep(demand.index, demand.expires, now)
    end
  elseif not earlier and not count.exists and count.used > 0 then
    save(count, demand.expires)
  end
  report(reply, count, whole(demand.limit))
end

if not earlier and not refused then
  remember(KEYS[2], ARGV[2], 'admitted ' .. short, ARGV[3])
end
return table.concat(reply, ' ')
