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
