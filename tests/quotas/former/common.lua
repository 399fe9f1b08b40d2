-- What every script begins with. Times are milliseconds of the server's clock.
-- bucket: hash of one count: used, reserved, doubtful, and `lease:ID` = "AMOUNT CERTAIN".
-- leases: sorted set of operation ids by the time at which their lease expires.
-- grants: sorted set of "AMOUNT:ID" and "block:ID:REASON" by the time until which they hold.
-- expired: sorted set of operation ids by the time at which their lease was found expired. Whoever
--       has the settlement of one in its ledger sends it; none can be sent after an hour.

local function whole(number)
  return string.format('%.0f', number)
end

local function field(bucket, name)
  return tonumber(redis.call('HGET', bucket, name) or 0)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function drop(bucket, leases, operation)
  local lease = redis.call('HGET', bucket, 'lease:' .. operation)
  if lease then
    local amount, certain = string.match(lease, '^(%d+) ([01])$')
    redis.call('HINCRBY', bucket, 'reserved', whole(0 - amount))
    redis.call('HINCRBY', bucket, 'doubtful', certain == '0' and -1 or 0)
    redis.call('HDEL', bucket, 'lease:' .. operation)
  end
  redis.call('ZREM', leases, operation)
end

local EXPIRED_MS = 3600000

local function void(bucket, leases, expired, now)
  for _, operation in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now))) do
    drop(bucket, leases, operation)
    redis.call('ZADD', expired, whole(now), operation)
    redis.call('ZREMRANGEBYSCORE', expired, '-inf', whole(now - EXPIRED_MS))
    redis.call('PEXPIRE', expired, EXPIRED_MS)
  end
end

-- A lease from before a backward step of the clock lasts no longer than a new one.
local function purge(bucket, leases, expired, now, lease_ms)
  void(bucket, leases, expired, now)
  local latest = whole(now + lease_ms)
  for _, operation in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. latest, '+inf')) do
    redis.call('ZADD', leases, 'XX', latest, operation)
  end
end

-- Where the count was lost, go on from what the asker saw last.
local function restore(bucket, known, expires)
  if known ~= '0' and redis.call('EXISTS', bucket) == 0 then
    redis.call('HSET', bucket, 'used', known)
    redis.call('PEXPIREAT', bucket, expires)
  end
end

-- How much more is permitted; and, where the key is blocked, "UNTIL:REASON".
local function granted(grants, now)
  local sum, block = 0, nil
  local held = redis.call('ZRANGEBYSCORE', grants, '(' .. whole(now), '+inf', 'WITHSCORES')
  for n = 1, #held, 2 do
    local amount, reason = string.match(held[n], '^(%d+):'), string.match(held[n], '^block:%x+:(.*)$')
    if amount then
      sum = sum + amount
    elseif reason then
      block = held[n + 1] .. ':' .. reason
    end
  end
  return sum, block
end

-- Let a key live until then, unless it is to live longer.
local function keep(key, at, now)
  local left = redis.call('PTTL', key)
  if left < 0 or now + left < tonumber(at) then
    redis.call('PEXPIREAT', key, at)
  end
end
