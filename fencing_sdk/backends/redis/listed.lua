-- Describe locks for a listing.
--   KEYS  lease, q, w, sq, sw, e, h of each
--   ->    for each: nil if it is free | {lease, ms left, waiters, server's time in microseconds,
--         then for each share its owner, the ms until it ends, and its entry in h}
local COUNTED = 64 -- in a longer line, waiters that have gone without leaving are counted too
local time = redis.call('TIME')
local now, micros = milliseconds(time), time[1] .. string.format('%06d', time[2])
local found = {}

-- Read a key; nil if it holds something else. Any other error, such as a missing permission, ends the script: without the
-- answer, a lock that is held would be left out.
local function read(command, key)
  local answer = redis.pcall(command, key)
  if type(answer) ~= 'table' then return answer end
  if not string.find(answer.err, '^WRONGTYPE') then redis.call(command, key) end
end

local function waiters(q, w)
  local count = read('ZCARD', q)
  if not count then return 0 end
  if count == 0 or count > COUNTED then return count end
  count = 0
  for _, sign in ipairs(redis.call('HVALS', w)) do
    local age = now - (tonumber(string.match(sign, '^%d+')) or 0)
    if age > -LINE_TTL and age < LINE_TTL then count = count + 1 end
  end
  return count
end

for i = 1, #KEYS, 7 do
  local lease, e, h = KEYS[i], KEYS[i + 5], KEYS[i + 6]
  local held = read('GETEX', lease)
  if type(held) == 'string' then
    local lock = {held, redis.call('PTTL', lease), waiters(KEYS[i + 1], KEYS[i + 2]) + waiters(KEYS[i + 3], KEYS[i + 4]), micros}
    add_shares(lock, held, lock[2], e, h, now)
    found[#found + 1] = lock
  else
    found[#found + 1] = false
  end
end
return found
