-- Set aside what a call may take at most, of all counts or of none.
-- KEYS: operation, expired, then for each demand: bucket, leases, grants, index.
-- ARGV: operation id, lease, how long to remember; then for each demand: amount, limit,
--       start and end of the window, expiry of the bucket, enforced, certain, alone, known,
--       index member.

local earlier = redis.call('GET', KEYS[1])
if earlier then
  return earlier
end

local DOUBTFUL = 2
local operation, lease_ms, remember_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local now = now_ms()

local demands = {}
for n = 1, (#KEYS - 2) / 4 do
  local key, arg = 4 * n - 2, 10 * n - 7
  demands[n] = {
    bucket = KEYS[key + 1], leases = KEYS[key + 2], grants = KEYS[key + 3], index = KEYS[key + 4],
    amount = tonumber(ARGV[arg + 1]), limit = tonumber(ARGV[arg + 2]),
    start = tonumber(ARGV[arg + 3]), finish = tonumber(ARGV[arg + 4]), expires = ARGV[arg + 5],
    enforced = ARGV[arg + 6] == '1', certain = ARGV[arg + 7], alone = ARGV[arg + 8] == '1',
    known = ARGV[arg + 9], member = ARGV[arg + 10],
  }
  if now < demands[n].start or now >= demands[n].finish then
    return 'elsewhere ' .. whole(now) .. ' -'
  end
end

local lacking, refused = {}, false
for n, demand in ipairs(demands) do
  restore(demand.bucket, demand.known, demand.expires)
  purge(demand.bucket, demand.leases, KEYS[2], now, lease_ms)
  if demand.certain == '0' and field(demand.bucket, 'doubtful') > 0 then
    demand.amount = DOUBTFUL * demand.amount
  end
  demand.used = field(demand.bucket, 'used')
  demand.reserved = field(demand.bucket, 'reserved')
  local more, block = granted(demand.grants, now)
  demand.limit = demand.limit + more
  -- An estimate that is more than the whole limit could never be met: then one call at a time.
  local lone = demand.alone and demand.amount > demand.limit and demand.reserved == 0
    and demand.used < demand.limit
  local fits = lone or demand.used + demand.reserved + demand.amount <= demand.limit
  if block or not fits then
    table.insert(lacking, block and (n - 1) .. '=' .. block or n - 1)
    refused = refused or demand.enforced
  end
end

local reply = {
  refused and 'refused' or 'admitted', whole(now),
  #lacking > 0 and table.concat(lacking, ',') or '-',
}
for _, demand in ipairs(demands) do
  if not refused then
    redis.call('HSET', demand.bucket, 'lease:' .. operation,
      whole(demand.amount) .. ' ' .. demand.certain)
    redis.call('HINCRBY', demand.bucket, 'doubtful', demand.certain == '0' and 1 or 0)
    demand.reserved = redis.call('HINCRBY', demand.bucket, 'reserved', whole(demand.amount))
    redis.call('ZADD', demand.leases, whole(now + lease_ms), operation)
    redis.call('PEXPIREAT', demand.bucket, demand.expires)
    redis.call('PEXPIREAT', demand.leases, demand.expires)
    redis.call('ZADD', demand.index, 'GT', whole(demand.finish), demand.member)
    redis.call('ZREMRANGEBYSCORE', demand.index, '-inf', whole(now))
    keep(demand.index, demand.expires, now)
  end
  table.insert(reply, whole(demand.used))
  table.insert(reply, whole(demand.reserved))
  table.insert(reply, whole(demand.limit))
end

local answer = table.concat(reply, ' ')
if not refused then
  redis.call('SET', KEYS[1], answer, 'PX', remember_ms)
end
return answer
