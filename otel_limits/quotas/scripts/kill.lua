-- Tell every listening process which agents to end, and note it for those that reconnect.
-- KEYS: kills. ARGV: "ID PATTERN", channel, how long to note it.

local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - ARGV[3]))
redis.call('ZADD', KEYS[1], whole(now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('PUBLISH', ARGV[2], ARGV[1])
