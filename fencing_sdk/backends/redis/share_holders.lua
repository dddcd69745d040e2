-- Describe one name and all who hold it.
--   KEYS  lease, q, w, sq, sw, e, h
--   ->    as listed.lua for one lock; without a permission to count the waiters -1 instead of them
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
local time = redis.call('TIME')
local now, micros = milliseconds(time), time[1] .. string.format('%06d', time[2])
local first, second = (count_line(KEYS[2], KEYS[3], now)), (count_line(KEYS[4], KEYS[5], now))
local found = {held, redis.call('PTTL', KEYS[1]), first and second and first + second or -1, micros}
add_shares(found, held, found[2], KEYS[6], KEYS[7], now)
return found
