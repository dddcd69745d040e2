-- What operators see and do, and what holders hear of it.

-- [inspect]
-- Return the hold, and the ms until it ends. Client tracking does not follow the key, because GETEX counts as a write.
--   KEYS  hold
--   ->    {hold, ms left} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
return {held, redis.call('PTTL', KEYS[1])}

-- [listed]
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

-- [revoke]
-- Delete the hold that an owner has for a token, note the reason, and wake the head of the line.
--   KEYS  hold, q, w, note
--   ARGV  owner, token, revocation, reason, ms for which the operator waits for the other nodes
--   ->    the revocation that came first and has deleted the hold; '' if there was none to delete then
-- The note stands for longer than the operator waits, and than the hold would have lasted. Meanwhile the holder gets no
-- new hold here ([heal]).
local hold, q, w, note = unpack(KEYS)
local owner, token, revocation, reason, patience = unpack(ARGV)
local NOTED = 1000 -- ms for which a note is kept longer than both
local found = redis.pcall('GETEX', hold)
if type(found) == 'table' then
  if not string.find(found.err, '^WRONGTYPE') then return found end
  found = false -- no hold, so the grant has none here
end
local held = found and read_hold(found)
held = held and held.owner == owner and held.token == token
local noted = redis.call('GETEX', note)
local first = noted and string.match(noted, '^' .. token .. '%z(%Z*)%z')
if not first then
  first = held and revocation or ''
  local kept = math.max(tonumber(patience), redis.call('PTTL', hold)) + NOTED
  redis.call('SET', note, table.concat({token, first, reason}, '\0'), 'PX', kept)
end
if held then
  redis.call('DEL', hold)
  wake_head(q, w)
end
return first

-- [noted]
-- Return why grants were revoked.
--   KEYS  the note of each: token NUL revocation NUL reason
--   ->    for each the reason, or '' if there is no note
local reasons = {}
for i, key in ipairs(KEYS) do
  local noted = redis.pcall('GETEX', key)
  reasons[i] = type(noted) == 'string' and string.match(noted, '^%d+%z%Z*%z(.*)$') or ''
end
return reasons
