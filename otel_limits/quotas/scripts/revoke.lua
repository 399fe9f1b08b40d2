-- Take back what was granted to a key, or unblock it.
-- KEYS: grants. ARGV: what members begin with that are taken back, as a pattern.
-- Returns how many of those were in force.

local now, found = now_ms(), 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now), '+inf')) do
  if string.match(member, ARGV[1]) then
    found = found + redis.call('ZREM', KEYS[1], member)
  end
end
return found
