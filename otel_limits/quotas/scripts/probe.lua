-- Name the first key of each count that has data of another program.
-- KEYS: run, then for each count: its bucket, leases and grants.
-- Returns one text for each count, empty if its keys are in order.

local found, run = {}, current(KEYS[1])
for n = 2, #KEYS, 3 do
  local damaged = ''
  for at = n + 2, n + 1, -1 do
    if type(redis.pcall('ZCARD', KEYS[at])) ~= 'number' then
      damaged = KEYS[at]
    end
  end
  if damaged ~= KEYS[n + 1] and not pcall(open, run, KEYS[n], KEYS[n + 1]) then
    damaged = KEYS[n]
  end
  found[#found + 1] = damaged
end
return found
