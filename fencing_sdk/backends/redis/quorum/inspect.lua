-- Return the hold, and the ms until it ends. Client tracking does not follow the key, because GETEX counts as a write.
--   KEYS  hold
--   ->    {hold, ms left} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
return {held, redis.call('PTTL', KEYS[1])}
