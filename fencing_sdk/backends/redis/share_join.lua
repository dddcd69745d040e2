-- Put the owner at the end of the line, unless it is in the line already, or holds the lock.
--   KEYS  lease, q, w
--   ARGV  owner, command that wakes it, channel ('-': none), ticket, metadata
--   ->    1 in the line | 0 the owner holds the lock
local lease, q, w, owner = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' and held.err then return held end
if held and string.sub(held, 1, #owner + 1) == owner .. '\0' then return 0 end
local behind = redis.call('ZREVRANGE', q, 0, 0, 'WITHSCORES')[2]
local last = math.max(tonumber(behind or 0), tonumber(redis.call('HGET', w, '') or 0)) -- '': see share.lua
local joined = redis.pcall('ZADD', q, 'NX', string.format('%.0f', last + 1), owner)
if type(joined) == 'table' then return joined end
local sign = string.format('%.0f', milliseconds()) .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. '\0' .. ARGV[5]
redis.call('HSET', w, owner, sign)
keep_line(q, w)
return 1
