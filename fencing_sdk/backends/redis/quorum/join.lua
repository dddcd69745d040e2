-- Put the owner into the line, unless it is in the line already, or holds the lock.
--   KEYS  hold, q, w
--   ARGV  owner, score in the line, channel, ticket
--   ->    1 in the line | 0 the owner holds the lock
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
if found and read_hold(found).owner == ARGV[1] then return 0 end
return enter_line(KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
