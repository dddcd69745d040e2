-- Delete the hold that an owner has for a token, note the reason, and wake the head of the line.
--   KEYS  hold, q, w, note
--   ARGV  owner, token, revocation, reason, ms for which the operator waits for the other nodes
--   ->    the revocation that came first and has deleted the hold; '' if there was none to delete then
-- The note stands for longer than the operator waits, and than the hold would have lasted. Meanwhile the holder gets no
-- new hold here (heal.lua).
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
