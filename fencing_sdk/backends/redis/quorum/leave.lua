-- Remove the owner from the line. If the lock is free here, wake the head of the line: the turn may have been the owner's.
--   KEYS  hold, q, w
--   ARGV  owner
--   ->    1
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
leave_line(KEYS[2], KEYS[3], ARGV[1])
if not found then wake_head(KEYS[2], KEYS[3]) end
return 1
