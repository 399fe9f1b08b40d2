-- Raise or set the limit of one key until a time, or block it.
-- KEYS: grants, index. ARGV: member as in granted(), until, retention after that,
-- index member.

local now, last = now_ms(), ARGV[2] + ARGV[3]
-- A block, or a limit that is set, atomically replaces an earlier one; also an expired one, which would
-- be active again if the clock were set back.
local kind = string.match(ARGV[1], '^%a+:')
if kind then
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if string.sub(member, 1, #kind) == kind then
      redis.call('ZREM', KEYS[1], member)
    end
  end
end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
keep(KEYS[1], whole(last), now)
-- List the key even if it was never used.
redis.call('ZADD', KEYS[2], 'GT', ARGV[2], ARGV[4])
keep(KEYS[2], whole(last), now)
return 1
