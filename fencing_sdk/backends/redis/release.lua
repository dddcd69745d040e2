-- Release the lock if the owner holds it, and wake the head of the line.
--   KEYS  lease, q, w; or only the lease, while the slot moves and the others are on another server
--   ARGV  owner
--   ->    1 released | 0 the owner does not hold it
local lease, owner = KEYS[1], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' and held.err then
  return string.find(held.err, '^WRONGTYPE') and 0 or held
end
if not held or string.sub(held, 1, #owner + 1) ~= owner .. '\0' then return 0 end
redis.call('DEL', lease)
if KEYS[2] then wake_head(KEYS[2], KEYS[3]) end
return 1
