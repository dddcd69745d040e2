-- Delete the hold of an attempt that was not won, and let a waiter stand in the line where it was.
--   KEYS  hold, q, w
--   ARGV  owner, attempt; for a waiter also: score in the line, channel, ticket
--   ->    1 deleted | 0 this attempt has no hold
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)
if not held or held.owner ~= ARGV[1] or held.attempt ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[3] then enter_line(KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4], ARGV[5]) end
return 1
