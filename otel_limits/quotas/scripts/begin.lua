-- Mark a new run of the server, at each connection. Nothing changes if it is the same process as before.
-- KEYS: run, restored, living, sharing, expired. ARGV: how long the run is remembered.

-- pcall, because a hosted service may not offer it: then only an emptied server is a new run.
local info = redis.pcall('INFO', 'server')
local server = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
if redis.call('HGET', KEYS[1], 'server') == server then
  return 0
end
-- Since when workers of an earlier run could notice this one. Without its marker, the server may have restarted
-- without data when it started. Rounded up, because servers report whole seconds.
local now = now_ms()
local uptime = type(info) == 'string' and string.match(info, 'uptime_in_seconds:(%d+)')
local since = uptime and 1000 * (math.floor(now / 1000) - uptime + 1) or 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  since = now
end
-- Restarted, or promoted: workers and expired reservations are those of an earlier run.
redis.call('DEL', unpack(KEYS))
redis.call('HSET', KEYS[1], 'server', server, 'name', whole(now) .. '-' .. string.sub(server, 1, 4),
  'since', whole(since))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
