-- Release the lock if the owner holds it. With a line, wake_head.lua goes on.
--   KEYS  lease, q, w; or only the lease, while the slot moves and the others are on another server
--   ARGV  owner
--   ->    1 released | 0 the owner does not hold it
local lease, q, w, owner = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then
  return string.find(held.err, '^WRONGTYPE') and 0 or held
end
if not held or string.sub(held, 1, #owner + 1) ~= owner .. '\0' then return 0 end
redis.call('DEL', lease)
if not q or redis.call('PEXPIRE', q, 12000) == 0 then return 1 end
