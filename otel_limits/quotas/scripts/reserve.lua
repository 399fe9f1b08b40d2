-- Set aside what a call may take at most, of all counts or of none.
-- KEYS: done, expired, kills, then for each demand: its bucket, leases, grants, index.
-- ARGV: operation id, its place in done, how long to remember; then for each demand: its numbers, in one
--       text as that is read fastest: amount, limit, start and end of the window, expiry of the bucket,
--       enforced, certain, alone, known, how long the asker waits, lease; its unit; its index member.
-- Told are status, time, what lacks, when the last kill was given, and how each count stands.
-- What lacks is told as "POSITION", with "=UNTIL:REASON" where the key is blocked, or with "@TIME" at
-- which the first reservation of that count ends by itself.

local DOUBTFUL = 2
local NUMBERS = '^' .. string.rep('(%S+) ', 10) .. '(%S+)$'
local operation = ARGV[1]
local now = now_ms()
-- Sent again, it is told how it was decided and how its counts stand now.
local earlier, already = string.match(redis.call('HGET', KEYS[1], ARGV[2]) or '', '^(%a+) (.*)$')

local demands = {}
for n = 1, (#KEYS - 3) / 4 do
  local key, arg = 4 * n - 1, 3 * n
  local amount, limit, start, finish, expires, enforced, certain, alone, known, waits, lease =
    string.match(ARGV[arg + 1], NUMBERS)
  if not earlier and (now < tonumber(start) or now >= tonumber(finish)) then
    return 'elsewhere ' .. whole(now) .. ' - 0'
  end
  demands[n] = {
    bucket = KEYS[key + 1], leases = KEYS[key + 2], grants = KEYS[key + 3], index = KEYS[key + 4],
    amount = tonumber(amount), limit = tonumber(limit), finish = finish, expires = expires,
    enforced = enforced == '1', certain = certain, alone = alone == '1', known = known,
    waits = tonumber(waits), lease = tonumber(lease), unit = ARGV[arg + 2], member = ARGV[arg + 3],
    -- What has no window began with time itself: its count goes on, and its keys must live on.
    is_endless = start == '0',
  }
end

local lacking, refused = {}, false
for n, demand in ipairs(demands) do
  local count = open(demand.bucket, demand.leases)
  demand.count = count
  restore(count, demand.known)
  void(count, KEYS[2], now, demand.unit)
  shorten(count, now, demand.lease)
  if demand.certain == '0' and count.doubtful > 0 then
    demand.amount = DOUBTFUL * demand.amount
  end
  local more, block = granted(demand.grants, demand.unit, now)
  demand.limit = demand.limit + more
  -- An estimate that is more than the whole limit could never be met: then one call at a time.
  local lone = demand.alone and demand.amount > demand.limit and count.reserved == 0
    and count.used < demand.limit
  local fits = lone or count.used + count.reserved + demand.amount <= demand.limit
  if block or not fits then
    local first = demand.enforced and redis.call('ZRANGE', count.leases, 0, 0, 'WITHSCORES')[2]
    local why = block and '=' .. block or first and '@' .. whole(first) or ''
    table.insert(lacking, (n - 1) .. why)
    -- A count that is not there has nothing that could become free.
    if demand.waits > 0 and count.exists and now + demand.waits > count.waited then
      redis.call('HSET', count.bucket, 'waited', whole(now + demand.waits))
    end
    refused = refused or demand.enforced
  end
end

local short = already or (#lacking > 0 and table.concat(lacking, ',') or '-')
-- For a process that does not hear what is published, although it may: it looks what was given. What
-- is not ours under this name must not keep anybody from being admitted.
local kill = redis.pcall('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
local status = earlier or (refused and 'refused' or 'admitted')
local reply = { status, whole(now), short, kill and whole(kill) or '0' }
for _, demand in ipairs(demands) do
  local count = demand.count
  if not earlier and not refused then
    local others = count.reserved
    count.reserved = others + demand.amount
    count.doubtful = count.doubtful + (demand.certain == '0' and 1 or 0)
    save(count, demand.expires, 'at', whole(now), 'lease:' .. operation,
      whole(demand.amount) .. ' ' .. demand.certain)
    redis.call('ZADD', count.leases, whole(now + demand.lease), operation)
    -- Unless others have leases: then it was said before.
    if others == 0 or demand.is_endless then
      redis.call('PEXPIREAT', count.leases, demand.expires)
    end
    if demand.is_endless then
      redis.call('PEXPIREAT', count.bucket, demand.expires)
    end
    -- The index is told once in a window. It is for people, and of all keys of a quota: what is not
    -- ours under its name must keep none of them from being admitted.
    if not count.at or demand.is_endless then
      redis.pcall('ZADD', demand.index, 'GT', demand.finish, demand.member)
      redis.pcall('ZREMRANGEBYSCORE', demand.index, '-inf', whole(now))
      keep(demand.index, demand.expires, now)
    end
  elseif not earlier and not count.exists and count.used > 0 then
    save(count, demand.expires)
  end
  table.insert(reply, whole(count.used))
  table.insert(reply, whole(count.reserved))
  table.insert(reply, whole(demand.limit))
end

if not earlier and not refused then
  remember(KEYS[1], ARGV[2], 'admitted ' .. short, ARGV[3])
end
return table.concat(reply, ' ')
