-- Grant, repeat an earlier grant to the same owner, or refuse.
--   KEYS  epoch, counter, hold, q, w
--   ARGV  epoch, owner, ttl in ms, hint and number of the attempt, metadata
--   ->    "NUMBER" granted | {ms left, 1 if the owner is in the line, "TOKEN", "ATTEMPT" of the hold in the way}
local key, q, w, owner, ttl, attempt = KEYS[3], KEYS[4], KEYS[5], ARGV[2], ARGV[3], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local found = redis.pcall('GETEX', key)
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)

if held and held.owner == owner then -- the number stays: the hold is unbroken
  local repeated = write_hold(key, owner, held.number, held.token, attempt, held.metadata, ttl)
  return repeated.err and repeated or held.number
end

local in_line = 0
if keep_line(q, w) then
  local now = milliseconds()
  if give_sign(w, owner, now) then in_line = 1 end
  local head, _, left = head_of_line(q, w, now)
  if not held and head and head ~= owner then return {left, in_line, '0', '0'} end
end
if held then return {redis.call('PTTL', key), in_line, held.token, held.attempt} end

local number = next_number(KEYS[2], attempt)
if not number then return redis.error_reply(TOKEN_RANGE) end
local written = write_hold(key, owner, number, number, attempt, ARGV[5], ttl)
if written.err then return written end
if in_line == 1 then leave_line(q, w, owner) end
return number
