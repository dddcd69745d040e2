-- Describe holds for a listing.
--   KEYS  hold, q of each lock
--   ->    for each: nil if it is free here | {hold, ms left, waiters}
local function read(command, key)
  local answer = redis.pcall(command, key)
  if type(answer) ~= 'table' then return answer end
  if not string.find(answer.err, '^WRONGTYPE') then redis.call(command, key) end -- raises it: the listing would lack a lock
end

local found = {}
for i = 1, #KEYS, 2 do
  local hold = read('GETEX', KEYS[i])
  found[#found + 1] = hold and {hold, redis.call('PTTL', KEYS[i]), read('ZCARD', KEYS[i + 1]) or 0}
end
return found
