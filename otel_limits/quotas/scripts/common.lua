-- Prefix of every script. Times are in milliseconds of the server's clock.
-- run: hash about this run of the server, which lasts until it restarts or another takes over: server (its
--       run_id), name, since (when workers of an earlier run could notice it), expected (how many workers have to
--       restore counts), joined (when the first did), opens (when calls are admitted).
-- restored: sorted set of the workers that sent what they know of earlier runs.
-- bucket: hash of one count: used, reserved, doubtful, at (time of the last reservation), waited (until
--       when releases are published to waiters), run, base (the part of used that is from earlier runs),
--       reset ("TIME.ID" of the last one), kept (its expiry), `lease:ID` = "AMOUNT CERTAIN LOST PLACE" (LOST is
--       charged if it expires), and `lost:ID` = "CHARGED RESET" of a lease that did. A token bucket also has
--       pace ("AMOUNT MILLISECONDS" in which it flows back) and flow ("AT REST OUT": until when it flowed back,
--       the fraction of a part that did, and all that ever flowed back or was given back), or only the latter
--       until its first reservation in a run. There, reserved is without what has flowed back, and PLACE is what
--       must flow back until all of a lease has.
-- leases: sorted set of operation IDs by lease expiry.
-- history: hash of a quota in one unit: by model, "TIME:USAGE" with the time of its last call and the usage of
--       its last 20 calls. The 256 models called last.
-- grants: sorted set of "AMOUNT:ID:UNIT", "set:AMOUNT:ID:UNIT", "block:ID:REASON" and "need:AMOUNT:SINCE:ID:UNIT"
--       by expiry. A need is what a waiting call lacked, since when, and the ID of its operation.
-- done: hash of the results of a hundred operations, by their last digits: "admitted UNMET", then
--       "settled -", or "settled RUN" if the call ended before that run; "counted" of a conversation. Compact, because it has a field for
--       every model call of an hour.
-- living: sorted set of the processes of a fleet, by last read. sharing: the same for those that may use
--       a local share in an outage.
-- conversation: hash of one conversation: agent, changed (time of the last addition), and its sums by name.
-- conversations: sorted set of the hashes of conversations by the expiry of their records.
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

-- Return the name of the run, and when its calls are admitted.
local function current(run)
  local found = redis.call('HMGET', run, 'name', 'opens')
  return found[1] or '', tonumber(found[2] or nil)
end

-- Add a field to those that are written with a count.
local function note(count, field, value)
  count.noted[#count.noted + 1], count.noted[#count.noted + 2] = field, value
end

-- Let the usage of a token bucket flow back since the last time.
local function flow(count, now)
  if not count.amount then
    return
  end
  local passed = (now - count.flowed) * count.amount + count.rest
  local gone, level = math.floor(passed / count.per), count.used + count.reserved
  local rest = passed - gone * count.per
  count.is_set_back = now < count.flowed
  -- At its end, and after the clock was set back, the flow starts over.
  if gone >= level or count.is_set_back then
    gone, rest = math.max(0, math.min(gone, level)), 0
  end
  local of_used = math.min(gone, count.used)
  count.used, count.reserved = count.used - of_used, count.reserved - (gone - of_used)
  count.flowed, count.rest, count.out = now, rest, count.out + gone
end

-- Let an amount of a token bucket flow back in so many milliseconds from now on.
local function pace(count, amount, per, now)
  local is_first = not count.amount
  count.flowed, count.out = count.flowed or now, count.out or 0
  if count.amount ~= amount or count.per ~= per then
    count.amount, count.per, count.rest = amount, per, 0
    note(count, 'pace', whole(amount) .. ' ' .. whole(per))
  end
  if is_first then
    flow(count, now)
  end
end

-- Return when so much more of a token bucket has flowed back.
local function room_at(count, lacking)
  return count.flowed + math.max(0, math.ceil((lacking * count.per - count.rest) / count.amount))
end

-- Return the limit of a reservation: the amount, or what a full token bucket holds.
local function capacity(amount, per, burst)
  return per == 0 and amount or burst > 0 and burst or math.ceil(amount / 10)
end

-- Take a count over from an earlier run.
local function begin(count, run)
  note(count, 'run', run)
  if count.exists then
    -- Its calls may have ended since. Those still in flight are reserved again.
    for _, each in ipairs(redis.call('ZRANGE', count.leases, 0, -1)) do
      redis.call('HDEL', count.bucket, 'lease:' .. each)
    end
    redis.call('DEL', count.leases)
    count.reserved, count.doubtful, count.base, count.lease = 0, 0, count.used, false
    note(count, 'base', whole(count.base))
  end
end

local LEASE = '^(%d+) ([01]) (%d+) (%d+)$'

-- Read a count, and the lease of an operation if one is given. Data of another program aborts the script here,
-- before anything is changed.
local function open(run, bucket, leases, operation)
  local found = redis.call('HMGET', bucket, 'used', 'reserved', 'doubtful', 'at', 'waited', 'run', 'base',
    'reset', 'kept', 'lease:' .. (operation or ''), 'lost:' .. (operation or ''), 'pace', 'flow')
  local doubtful = tonumber(found[3] or 0)
  local count = {
    bucket = bucket, leases = leases, exists = found[1], noted = {},
    used = tonumber(found[1] or 0), reserved = tonumber(found[2] or 0),
    doubtful = doubtful, saved_doubtful = doubtful,
    at = tonumber(found[4] or nil), waited = tonumber(found[5] or 0), base = tonumber(found[7] or 0),
    reset = found[8] or '', kept = tonumber(found[9] or 0), lease = found[10],
  }
  -- A reset removed what was charged before it.
  local charged, reset = string.match(found[11] or '', '^(%d+) (.*)$')
  count.lost = reset == count.reset and tonumber(charged) or 0
  local at, rest, out = string.match(found[13] or '', '^(%d+) (%d+) (%d+)$')
  count.flowed, count.rest, count.out = tonumber(at), tonumber(rest), tonumber(out)
  if at and found[12] then
    local amount, per = string.match(found[12], '^(%d+) (%d+)$')
    count.amount, count.per = tonumber(amount), tonumber(per)
  end
  local _ = count.used + count.reserved + count.doubtful + count.waited + count.base + count.kept
    + redis.call('ZCARD', leases) + (count.lease and string.match(count.lease, LEASE) or 0)
  if (found[6] or '') ~= run then
    begin(count, run)
  end
  if count.amount then
    flow(count, now_ms())
  end
  return count
end
-- Write a count and the given fields, and keep it for the longest of the windows it was used with.
local function save(count, expires, ...)
  for _, each in ipairs({ ... }) do
    count.noted[#count.noted + 1] = each
  end
  if count.doubtful ~= count.saved_doubtful then
    count.saved_doubtful = count.doubtful
    note(count, 'doubtful', whole(count.doubtful))
  end
  if count.flowed then
    -- Before its pace is known, the flow starts over with each change.
    local flowed = count.amount and count.flowed or now_ms()
    note(count, 'flow', whole(flowed) .. ' ' .. whole(count.rest) .. ' ' .. whole(count.out))
  end
  local is_kept = count.kept >= tonumber(expires or 0)
  if not is_kept then
    count.kept = tonumber(expires)
    note(count, 'kept', expires)
  end
  redis.call('HSET', count.bucket, 'used', whole(count.used), 'reserved', whole(count.reserved),
    unpack(count.noted))
  count.noted = {}
  if not is_kept then
    redis.call('PEXPIREAT', count.bucket, expires)
    redis.call('PEXPIREAT', count.leases, expires)
  end
end

-- Release one lease of a count, and count the usage of its call.
local function release(count, lease, used)
  local amount, certain, _, place = string.match(lease, LEASE)
  local held, unspent = math.min(amount, count.reserved), amount - used
  if count.amount then
    -- What has flowed back is not given back again.
    unspent = math.min(unspent, held, math.max(0, place - count.out))
    count.out = count.out + math.max(0, unspent)
  end
  count.reserved, count.used = count.reserved - held, count.used + held - unspent
  count.doubtful = count.doubtful - (certain == '0' and 1 or 0)
end

-- Calls of unknown size could each exceed their estimate, and together the limit.
local DOUBTFUL = 2
local function wanted(count, amount, certain)
  return certain == '0' and count.doubtful > 0 and DOUBTFUL * amount or tonumber(amount)
end

-- Reserve for an operation, and write the count and the given fields.
local function take(count, operation, amount, certain, lost, ends, expires, ...)
  -- A renewal may have reserved for it already, after a restart.
  if count.lease then
    release(count, count.lease, 0)
  end
  local others = count.reserved
  count.reserved = others + amount
  local place = count.amount and count.out + count.used + count.reserved or 0
  count.doubtful = count.doubtful + (certain == '0' and 1 or 0)
  save(count, expires, 'lease:' .. operation, whole(amount) .. ' ' .. certain .. ' ' .. whole(lost) .. ' '
    .. whole(place), ...)
  redis.call('ZADD', count.leases, whole(ends), operation)
  -- With other leases, the expiry is already set.
  if others == 0 then
    redis.call('PEXPIREAT', count.leases, whole(count.kept))
  end
end

-- Remember the result of an operation.
local function remember(done, place, what, remember_ms)
  redis.call('HSET', done, place, what)
  redis.call('PEXPIRE', done, remember_ms)
end

local REMEMBERED_CALLS, REMEMBERED_MODELS = 20, 256

-- Return the usage of a model's last calls. pcall, because data of another program under this name must
-- not block admissions.
local function last_calls(history, model)
  local found, calls = redis.pcall('HGET', history, model), {}
  local usage = type(found) == 'string' and string.match(found, '^%d+:(.*)$') or ''
  for each in string.gmatch(usage, '%d+') do
    calls[#calls + 1] = each
  end
  return calls
end

-- Return what to charge for a call if its lease expires: the mean of the last ones, or all that it reserves.
local function charged_if_lost(history, model, amount)
  if model == '-' then
    return 0
  end
  local calls, sum = last_calls(history, model), 0
  for _, each in ipairs(calls) do
    sum = sum + each
  end
  return #calls > 0 and math.min(amount, math.ceil(sum / #calls)) or amount
end

-- Make room for another model: forget the one that was called longest ago.
local function forget_model(history)
  local known, oldest, since = redis.pcall('HGETALL', history), nil, math.huge
  for n = 1, #known, 2 do
    local at = tonumber(string.match(known[n + 1], '^(%d+):') or 0)
    if at < since then
      oldest, since = known[n], at
    end
  end
  redis.pcall('HDEL', history, oldest)
end

-- Add a call to the last ones of its model.
local function note_call(history, model, amount, expires, now)
  local calls, known = last_calls(history, model), redis.pcall('HLEN', history)
  if #calls == 0 and type(known) == 'number' and known >= REMEMBERED_MODELS then
    forget_model(history)
  end
  calls[#calls + 1] = amount
  local first = math.max(1, #calls - REMEMBERED_CALLS + 1)
  redis.pcall('HSET', history, model, whole(now) .. ':' .. table.concat(calls, ' ', first))
  redis.pcall('PEXPIREAT', history, expires)
end

local EXPIRED_MS = 3600000
-- The next script expires the rest: a running script blocks the server.
local EXPIRED_AT_ONCE = 200

-- Release expired reservations, whose workers are presumed dead.
local function expire(count, expired, now, unit)
  if not count.exists then
    return
  end
  local dead = redis.call('ZRANGEBYSCORE', count.leases, '-inf', whole(now), 'LIMIT', 0, EXPIRED_AT_ONCE)
  if #dead == 0 then
    return
  end
  for _, operation in ipairs(dead) do
    local lease = redis.call('HGET', count.bucket, 'lease:' .. operation)
    if lease then
      local lost = string.match(lease, '^%d+ [01] (%d+)')
      release(count, lease, lost)
      redis.call('HDEL', count.bucket, 'lease:' .. operation)
      if lost ~= '0' then
        note(count, 'lost:' .. operation, lost .. ' ' .. count.reset)
      end
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

-- Add usage of earlier runs that is known elsewhere, unless as much is known here. A later reset wins.
local function restore(count, used, reset, seen)
  if reset > count.reset or (reset == count.reset and used > seen) then
    -- Of a token bucket, what was seen here may have flowed back.
    count.used, count.base = math.max(0, count.used - seen) + used, math.max(0, count.base - seen + used)
    count.reset = reset
    note(count, 'base', whole(count.base))
    if reset ~= '' then
      note(count, 'reset', reset)
    end
  end
end

-- Restore a count that is missing here from the last usage seen by the client.
local function resume(count, known)
  if not count.exists and known ~= '0' then
    restore(count, tonumber(known), count.reset, 0)
  end
end

-- Add the state of a count to a reply.
local function report(reply, count, limit)
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = whole(count.used), whole(count.reserved), limit
  reply[n + 4] = count.reset ~= '' and count.reset or '-'
  reply[n + 5] = count.amount and whole(room_at(count, count.used + count.reserved)) or '0'
end

-- Return the sum of grants, "UNTIL:REASON" if the key is blocked, the limit if one is set, and the needs of
-- waiting calls.
local function granted(grants, unit, now)
  local sum, block, set, needs = 0, nil, nil, {}
  local held = redis.call('ZRANGEBYSCORE', grants, '(' .. whole(now), '+inf', 'WITHSCORES')
  for n = 1, #held, 2 do
    local amount, of = string.match(held[n], '^(%d+):%x+:([%a_]*)$')
    local reason = string.match(held[n], '^block:%x+:(.*)$')
    local changed, to = string.match(held[n], '^set:(%d+):%x+:([%a_]*)$')
    if amount and of == unit then
      sum = sum + amount
    elseif reason then
      block = held[n + 1] .. ':' .. reason
    elseif changed and to == unit then
      set = tonumber(changed)
    end
    local need, since, operation, unmet = string.match(held[n], '^need:(%d+):(%d+):([^:]+):([%a_]*)$')
    if need and unmet == unit then
      needs[#needs + 1] = {
        member = held[n], amount = tonumber(need), since = tonumber(since), operation = operation,
      }
    end
  end
  return sum, block, set, needs
end

-- Return whether one need is older than another.
local function is_older(one, other)
  return one.since < other.since or (one.since == other.since and one.operation < other.operation)
end

-- Extend the expiry of a key; never shorten it.
local function keep(key, at, now)
  local left = redis.call('PTTL', key)
  if left < 0 or now + left < tonumber(at) then
    redis.call('PEXPIREAT', key, at)
  end
end
