-- Describe locks for a listing.
--   KEYS  lease, q, w, sq, sw, e, h of each
--   ->    for each: nil if it is free | {lease, ms left, waiters, server's time in microseconds,
--         then for each share its owner, the ms until it ends, and its entry in h}
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

for i = 1, #KEYS, 7 do
  local lease, e, h = KEYS[i], KEYS[i + 5], KEYS[i + 6]
  local held = read('GETEX', lease)
  if type(held) == 'string' then
    local first, refused = count_line(KEYS[i + 1], KEYS[i + 2], now)
    if refused then return refused end
    local second, refused_too = count_line(KEYS[i + 3], KEYS[i + 4], now)
    if refused_too then return refused_too end
    local lock = {held, redis.call('PTTL', lease), first + second, micros}
    add_shares(lock, held, lock[2], e, h, now)
    found[#found + 1] = lock
  else
    found[#found + 1] = false
  end
end
return found
