-- Return the lease, the ms until it ends, and the server's time. Client tracking does not follow the key, because GETEX
-- counts as a write.
--   KEYS  lease
--   ->    {lease, ms left, server's time in microseconds} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
local time = redis.call('TIME')
return {held, redis.call('PTTL', KEYS[1]), time[1] .. string.format('%06d', time[2])}
