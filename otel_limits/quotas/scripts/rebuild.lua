-- Mark calls that ended before this run as settled, because a ledger has their usage.
-- KEYS: run, then for each call: done. ARGV: retention, then for each call: its field in done.
-- Returns the positions of those that were counted in this run, and are not marked.

local counted, run = {}, current(KEYS[1])
for n = 2, #KEYS do
  if redis.call('HGET', KEYS[n], ARGV[n]) == 'settled ' .. run then
    counted[#counted + 1] = n - 2
  else
    remember(KEYS[n], ARGV[n], 'settled -', ARGV[1])
  end
end
return counted
