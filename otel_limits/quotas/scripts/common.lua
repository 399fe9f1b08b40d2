-- Prefix of every script. Times are in milliseconds of the server's clock.
-- bucket: hash of one count: used, reserved, doubtful, at (time of the last reservation), waited (until
--       when releases are published to waiters), and `lease:ID` = "AMOUNT CERTAIN".
-- leases: sorted set of operation IDs by lease expiry.
-- grants: sorted set of "AMOUNT:ID:UNIT" and "block:ID:REASON" by expiry.
-- done: hash of the results of a hundred operations, by their last digits: "admitted UNMET", then
--       "settled -". Compact, because it has a field for every model call of an hour.
-- workers: sorted set of the processes that may use a local share in an outage, by last read.
-- expired: sorted set of IDs of expired reservations by the time of detection. A process whose ledger
--       has the settlement sends it, within an hour.

-- Formats 64-bit integers; twice as fast as %.0f.
local function whole(number)
  return string.format('%d', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Read a count, and the lease of an operation if one is given.
local function open(bucket, leases, operation)
  local found = redis.call('HMGET', bucket, 'used', 'reserved', 'doubtful', 'at', 'waited',
    'lease:' .. (operation or ''))
  local doubtful = tonumber(found[3] or 0)
  return {
    bucket = bucket, leases = leases, exists = found[1],
    used = tonumber(found[1] or 0), reserved = tonumber(found[2] or 0),
    doubtful = doubtful, saved_doubtful = doubtful,
    at = tonumber(found[4] or nil), waited = tonumber(found[5] or 0), lease = found[6],
  }
end

-- Write the changed fields of a count, and the given ones.
local function save(count, expires, ...)
  local fields = { 'used', whole(count.used), 'reserved', whole(count.reserved), ... }
  if count.doubtful ~= count.saved_doubtful then
    fields[#fields + 1], fields[#fields + 2] = 'doubtful', whole(count.doubtful)
    count.saved_doubtful = count.doubtful
  end
  redis.call('HSET', count.bucket, unpack(fields))
  if not count.exists then
    redis.call('PEXPIREAT', count.bucket, expires)
  end
end

-- Deduct one lease from a count.
local function release(count, lease)
  local amount, certain = string.match(lease, '^(%d+) ([01])$')
  count.reserved = count.reserved - amount
  count.doubtful = count.doubtful - (certain == '0' and 1 or 0)
end

-- Remember the result of an operation.
local function remember(done, place, what, remember_ms)
  redis.call('HSET', done, place, what)
  redis.call('PEXPIRE', done, remember_ms)
end

local EXPIRED_MS = 3600000
-- The next script expires the rest: a running script blocks the server.
local VOIDED = 200

-- Release expired reservations, whose workers are presumed dead.
local function void(count, expired, now, unit)
  if not count.exists then
    return
  end
  local dead = redis.call('ZRANGEBYSCORE', count.leases, '-inf', whole(now), 'LIMIT', 0, VOIDED)
  if #dead == 0 then
    return
  end
  for _, operation in ipairs(dead) do
    local lease = redis.call('HGET', count.bucket, 'lease:' .. operation)
    if lease then
      release(count, lease)
      redis.call('HDEL', count.bucket, 'lease:' .. operation)
    end
    -- Concurrency slots need no settlement. pcall, because all counts share this key: data of another
    -- program under its name must not block them.
    if unit ~= 'concurrency' then
      redis.pcall('ZADD', expired, whole(now), operation)
    end
  end
  redis.call('ZREM', count.leases, unpack(dead))
  save(count)
  redis.pcall('ZREMRANGEBYSCORE', expired, '-inf', whole(now - EXPIRED_MS))
  redis.call('PEXPIRE', expired, EXPIRED_MS)
end

-- After a backward step of the clock, shorten leases to the length of a new one.
local function shorten(count, now, lease_ms)
  if not count.exists or (count.at and now >= count.at) then
    return
  end
  local latest = whole(now + lease_ms)
  for _, operation in ipairs(redis.call('ZRANGEBYSCORE', count.leases, '(' .. latest, '+inf')) do
    redis.call('ZADD', count.leases, 'XX', latest, operation)
  end
end

-- If the count was lost, continue from the last usage seen by the client.
local function restore(count, known)
  if not count.exists then
    count.used = tonumber(known)
  end
end

-- Return the sum of grants and, if the key is blocked, "UNTIL:REASON".
local function granted(grants, unit, now)
  local sum, block = 0, nil
  local held = redis.call('ZRANGEBYSCORE', grants, '(' .. whole(now), '+inf', 'WITHSCORES')
  for n = 1, #held, 2 do
    local amount, of = string.match(held[n], '^(%d+):%x+:([%a_]*)$')
    local reason = string.match(held[n], '^block:%x+:(.*)$')
    if amount and of == unit then
      sum = sum + amount
    elseif reason then
      block = held[n + 1] .. ':' .. reason
    end
  end
  return sum, block
end

-- Extend the expiry of a key; never shorten it.
local function keep(key, at, now)
  local left = redis.call('PTTL', key)
  if left < 0 or now + left < tonumber(at) then
    redis.call('PEXPIREAT', key, at)
  end
end
