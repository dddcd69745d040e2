-- Release the owner's hold, whatever its number, and wake the head of the line.
--   KEYS  hold, q, w
--   ARGV  owner
--   ->    1 released | 0 there is no hold | -1 another owner has it
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then
  return string.find(found.err, '^WRONGTYPE') and -1 or found
end
if not found then return 0 end
if read_hold(found).owner ~= ARGV[1] then return -1 end
redis.call('DEL', KEYS[1])
wake_head(KEYS[2], KEYS[3])
return 1
