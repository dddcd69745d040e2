-- What the node knows about the quorum it belongs to.
--   KEYS  epoch, founding, id, run
--   ->    {epoch, founding, id, run}, '' where there is none
local known = {}
for i, key in ipairs(KEYS) do known[i] = redis.call('GETEX', key) or '' end
return known
