-- Tell who holds the lock, and for how many ms without a renewal. Follows nothing that it reads.
--   KEYS  lease
--   ->    {lease, ms left} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
return {held, redis.call('PTTL', KEYS[1])}
