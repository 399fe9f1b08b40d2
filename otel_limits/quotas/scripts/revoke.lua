-- Revoke the grants of a key, or unblock it.
-- KEYS: grants. ARGV: pattern of the members to remove.
-- Returns how many active ones were removed.

local now, found = now_ms(), 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now), '+inf')) do
  if string.match(member, ARGV[1]) then
    found = found + redis.call('ZREM', KEYS[1], member)
  end
end
return found
