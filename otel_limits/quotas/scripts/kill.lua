-- Publish a kill to all processes, and store it for those that miss the message.
-- KEYS: kills. ARGV: ID, pattern, channel, retention.

local now, time = now_ms(), redis.call('TIME')
-- Includes the server's time in microseconds: later invocations are unaffected, even if the kill
-- arrives late.
local order = ARGV[1] .. '@' .. time[1] .. string.format('%06d', time[2]) .. ' ' .. ARGV[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - ARGV[4]))
redis.call('ZADD', KEYS[1], whole(now), order)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('PUBLISH', ARGV[3], order)
