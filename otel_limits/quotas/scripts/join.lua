-- Join a run of the server, after restoring what is known of earlier ones. May be repeated.
-- KEYS: run, restored. ARGV: worker ID, name of the run, how many workers it knew in an earlier run (0 if it
-- was in none), for how long calls wait for them at most, and for how long they wait for unknown ones.
-- Returns for how many milliseconds they still wait; -1 if there is another run.

local now, expected, most = now_ms(), tonumber(ARGV[3]), tonumber(ARGV[4])
local found = redis.call('HMGET', KEYS[1], 'name', 'expected', 'joined', 'since')
if found[1] ~= ARGV[2] then
  return -1
end
if expected > 0 then
  redis.call('ZADD', KEYS[2], whole(now), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], 2 * most)
end
expected = math.max(expected, tonumber(found[2] or 0))
local joined = tonumber(found[3] or now)
local opens = redis.call('ZCARD', KEYS[2]) >= expected and now or joined + most
opens = math.max(opens, math.min(joined, tonumber(found[4] or 0)) + ARGV[5])
redis.call('HSET', KEYS[1], 'expected', whole(expected), 'joined', whole(joined), 'opens', whole(opens))
return math.max(0, opens - now)
