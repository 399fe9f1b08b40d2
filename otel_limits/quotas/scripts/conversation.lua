-- Add to the record of a conversation, once, and return it.
-- KEYS: the record; to add to it also: the expiry of each record, and done.
-- ARGV, to add: hash of the conversation, its agent, how long the record is kept, the operation's field in done,
--       retention; then the name of each sum, and what is added to it.
-- Returns the time, and the fields of the record with their values.

local now = now_ms()
if #ARGV > 0 and not redis.call('HGET', KEYS[3], ARGV[4]) then
  for n = 6, #ARGV, 2 do
    redis.call('HINCRBY', KEYS[1], ARGV[n], ARGV[n + 1])
  end
  redis.call('HSET', KEYS[1], 'agent', ARGV[2], 'changed', whole(now))
  local expires = whole(now + ARGV[3])
  redis.call('PEXPIREAT', KEYS[1], expires)
  remember(KEYS[3], ARGV[4], 'counted', ARGV[5])
  -- pcall, because all records share this key: data of another program under its name must not block them.
  redis.pcall('ZADD', KEYS[2], expires, ARGV[1])
  redis.pcall('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
  local last = redis.pcall('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
  redis.pcall('PEXPIREAT', KEYS[2], last[2] and whole(last[2]) or 0)
end
return { whole(now), unpack(redis.call('HGETALL', KEYS[1])) }
