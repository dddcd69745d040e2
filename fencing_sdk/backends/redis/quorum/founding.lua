-- What a node knows of its quorum, and how it gets to know it.

-- [look]
-- What the node knows about the quorum it belongs to.
--   KEYS  epoch, founding, id, run
--   ->    {epoch, founding, id, run}, '' where there is none
local known = {}
for i, key in ipairs(KEYS) do known[i] = redis.call('GETEX', key) or '' end
return known

-- [found]
-- One step of founding. Each is safe to repeat, and none changes a node that has an epoch.
--   KEYS  epoch, founding, id, run
--   ARGV  'name', a random id | 'propose', an epoch, 'first' on the node that decides between founders
--         | 'settle', the proposed epoch, the run of the server
--   ->    {epoch, founding, id, run}, '' where there is none
local step, value = ARGV[1], ARGV[2]
local epoch, founding = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if step == 'name' then
  redis.call('SET', KEYS[3], value, 'NX')
elseif not epoch and step == 'propose' then
  if not founding or ARGV[3] ~= 'first' then redis.call('SET', KEYS[2], value) end
elseif not epoch and step == 'settle' and founding == value then
  redis.call('SET', KEYS[1], value)
  redis.call('SET', KEYS[4], ARGV[3])
end
local known = {}
for i, key in ipairs(KEYS) do known[i] = redis.call('GET', key) or '' end
return known

-- [seal]
-- Give a node that remembers a new epoch, and read its counters: what was half done in the old epoch cannot be ended.
--   KEYS  epoch, run, counters
--   ARGV  the epoch it must have, the new one, the run of the server
--   ->    the counters, '' where there is none | 0 it has another epoch meanwhile
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
return redis.call('MGET', unpack(KEYS, 3))

-- [admit]
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

-- [scan]
-- Look at some keys: how long the longest of these holds lasts.
--   ARGV  cursor, pattern
--   ->    {next cursor, ms}
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500)
local longest = 0
for _, key in ipairs(found[2]) do longest = math.max(longest, redis.call('PTTL', key)) end
return {found[1], longest}
