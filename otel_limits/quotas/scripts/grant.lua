-- Permit more of one key until a time.
-- KEYS: grants. ARGV: member "AMOUNT:ID", until, how long to keep what is over.

redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', KEYS[1], whole(last + ARGV[3]))
return 1
