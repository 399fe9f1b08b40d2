-- Count from 0 again.
-- KEYS: the two buckets of the count, each with its leases. ARGV: unit, expiry of the bucket.

local count = open(KEYS, ARGV[1])
count.used = 0
save(count, ARGV[2])
return 1
