-- Set usage to 0.
-- KEYS: run, the bucket of the count, its leases. ARGV: expiry of the bucket, ID of the reset.
-- Returns the time and the ID, by which the later of two resets is known.

local count = open(current(KEYS[1]), KEYS[2], KEYS[3])
-- Padded, so that texts compare like times. The clock may have gone back since the last one.
local last = tonumber(string.match(count.reset, '^%d+')) or 0
local reset = string.format('%014d', math.max(now_ms(), last + 1)) .. '.' .. ARGV[2]
if count.amount then
  count.out, count.reserved = count.out + count.used + count.reserved, 0
end
count.used, count.base = 0, 0
save(count, ARGV[1], 'reset', reset, 'base', '0')
return reset
