-- Give a node that remembers a new epoch, and read its counters: what was half done in the old epoch cannot be ended.
--   KEYS  epoch, run, counters
--   ARGV  the epoch it must have, the new one, the run of the server
--   ->    the counters, '' where there is none | 0 it has another epoch meanwhile
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
return redis.call('MGET', unpack(KEYS, 3))
