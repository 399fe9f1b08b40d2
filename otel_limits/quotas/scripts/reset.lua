-- Set usage to 0.
-- KEYS: the bucket of the count, its leases. ARGV: expiry of the bucket.

local count = open(KEYS[1], KEYS[2])
count.used = 0
save(count, ARGV[1])
return 1
