-- Remove the owner from the line. If the lock is free, wake the head of the line: the turn may have been the owner's.
--   KEYS  lease, q, w
--   ARGV  owner
--   ->    1
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' and held.err then return held end
leave_line(KEYS[2], KEYS[3], ARGV[1])
if not held then wake_head(KEYS[2], KEYS[3]) end
return 1
