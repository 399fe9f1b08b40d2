-- Tell every listening process which agents to end, and note it for those that do not hear it.
-- KEYS: kills. ARGV: ID, pattern, channel, how long to note it.

local now, time = now_ms(), redis.call('TIME')
-- With the server's time, in microseconds: what begins later is not meant, however late the order is
-- heard.
local order = ARGV[1] .. '@' .. time[1] .. string.format('%06d', time[2]) .. ' ' .. ARGV[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - ARGV[4]))
redis.call('ZADD', KEYS[1], whole(now), order)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('PUBLISH', ARGV[3], order)
