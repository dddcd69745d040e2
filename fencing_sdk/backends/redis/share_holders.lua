-- Return the lease, the ms until it ends, and for each share its owner, the ms until it ends, and its entry in h.
--   KEYS  lease, e, h
--   ->    {lease, ms left, owner, ms left, entry, ...} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
local found = {held, redis.call('PTTL', KEYS[1])}
add_shares(found, held, found[2], KEYS[2], KEYS[3], milliseconds())
return found
