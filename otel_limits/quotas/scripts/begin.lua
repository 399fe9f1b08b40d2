-- Mark a new run of the server, at each connection. Nothing changes if it is the same process as before.
-- KEYS: run, restored, living, sharing, expired. ARGV: how long the run is remembered.

-- pcall, because a hosted service may not offer it: then only an emptied server is a new run.
local info = redis.pcall('INFO', 'server')
local server = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
if redis.call('HGET', KEYS[1], 'server') == server then
  return 0
end
-- Restarted, or promoted: workers and expired reservations are those of an earlier run.
redis.call('DEL', unpack(KEYS))
redis.call('HSET', KEYS[1], 'server', server, 'name', whole(now_ms()) .. '-' .. string.sub(server, 1, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
