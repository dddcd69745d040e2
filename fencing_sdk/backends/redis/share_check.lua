-- Whether the owner still has its share. Unlike a renewal it changes nothing, so that no other client is told of it.
--   KEYS  lease, e
--   ARGV  owner
--   ->    one character, as renew.lua
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' then return held end
if not is_shared(held) then return held and 'x' or '0' end
local _, alone = read_shared(held)
if alone ~= '' then return alone == ARGV[1] and '1' or '0' end
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
return ends and tonumber(ends) > milliseconds() and '1' or '0'
