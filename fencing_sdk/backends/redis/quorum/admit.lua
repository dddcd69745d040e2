-- Let a node vote (again): raise its counters to those of the others, then give it the epoch.
--   KEYS  epoch, founding, id, run, counters
--   ARGV  the epoch it must have ('': none), the new one, a random id, the run of the server, the counters
--   ->    1 | 0 it has another epoch meanwhile
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
for i = 5, #KEYS do
  if tonumber(ARGV[i]) > tonumber(redis.call('GET', KEYS[i]) or '0') then redis.call('SET', KEYS[i], ARGV[i]) end
end
redis.call('SET', KEYS[3], ARGV[3], 'NX')
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[4], ARGV[4])
redis.call('SET', KEYS[1], ARGV[2])
return 1
