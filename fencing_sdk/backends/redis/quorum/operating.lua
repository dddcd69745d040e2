-- What operators do: found a quorum, list what is held, and revoke it.

-- [found]
-- One step of founding. Each is safe to repeat, and none changes a node that has an epoch.
--   KEYS  epoch, founding, id, run
--   ARGV  'name', a random id | 'propose', an epoch, 'first' on the node that decides between founders
--         | 'settle', the proposed epoch, the run of the server
--   ->    {epoch, founding, id, run}, '' where there is none
local step, value = ARGV[1], ARGV[2]
local epoch, founding = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if step == 'name' then
  redis.call('SET', KEYS[3], value, 'NX')
elseif not epoch and step == 'propose' then
  if not founding or ARGV[3] ~= 'first' then redis.call('SET', KEYS[2], value) end
elseif not epoch and step == 'settle' and founding == value then
  redis.call('SET', KEYS[1], value)
  redis.call('SET', KEYS[4], ARGV[3])
end
local known = {}
for i, key in ipairs(KEYS) do known[i] = redis.call('GET', key) or '' end
return known

-- [seal]
-- Give a node that remembers a new epoch, and read its counters: what was half done in the old epoch cannot be ended.
--   KEYS  epoch, run, counters
--   ARGV  the epoch it must have, the new one, the run of the server
--   ->    the counters, '' where there is none | 0 it has another epoch meanwhile
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
return redis.call('MGET', unpack(KEYS, 3))

-- [admit]
-- Let a node vote (again): raise its counters to those of the others, then give it the epoch.
--   KEYS  epoch, founding, id, run, counters
--   ARGV  the epoch it must have ('': none), the new one, a random id, the run of the server, the counters
--   ->    1 | 0 it has another epoch meanwhile
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
for i = 5, #KEYS do
  if tonumber(ARGV[i]) > tonumber(redis.call('GET', KEYS[i]) or '0') then redis.call('SET', KEYS[i], ARGV[i]) end
end
redis.call('SET', KEYS[3], ARGV[3], 'NX')
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[4], ARGV[4])
redis.call('SET', KEYS[1], ARGV[2])
return 1

-- [scan]
-- Look at some keys: how long the longest of these holds lasts.
--   ARGV  cursor, pattern
--   ->    {next cursor, ms}
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500)
local longest = 0
for _, key in ipairs(found[2]) do longest = math.max(longest, redis.call('PTTL', key)) end
return {found[1], longest}

-- [inspect]
-- Return the hold, and the ms until it ends.
--   KEYS  hold
--   ->    {hold, ms left} | nil
local held = redis.pcall('GET', KEYS[1])
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
  local hold = read('GET', KEYS[i])
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
