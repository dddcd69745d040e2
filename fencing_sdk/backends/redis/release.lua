-- Give the lock back if it is the owner's, and wake the head of the line.
--   KEYS  lease, q, w; or the lease alone, where the others cannot be reached
--   ARGV  owner
--   ->    1 released | 0 it was not ours
local lease, owner = KEYS[1], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' and held.err then
  return string.find(held.err, '^WRONGTYPE') and 0 or held
end
if not held or string.sub(held, 1, #owner + 1) ~= owner .. '\0' then return 0 end
redis.call('DEL', lease)
if KEYS[2] then wake_head(KEYS[2], KEYS[3]) end
return 1
