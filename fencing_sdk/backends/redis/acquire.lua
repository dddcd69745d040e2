-- Grant, repeat an earlier grant to the same owner, or refuse.
--   KEYS  lease, last token, q, w
--   ARGV  owner, ttl in ms, metadata, 'hybrid' or 'counter', ms that an idle counter is kept (0: for ever),
--         'fair' or 'barge' (a free lock goes to the first request)
--   ->    "TOKEN" granted | {ms left, 1 if the owner is in the line}
local lease, last, q, w = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, ttl, retention = ARGV[1], ARGV[2], tonumber(ARGV[5])

-- GETEX reads, but counts as a write: a replica refuses it, and client tracking does not follow the key.
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' and held.err then return held end

if held and string.sub(held, 1, #owner + 1) == owner .. '\0' then
  redis.call('PEXPIRE', lease, ttl)
  return string.match(held, '^[0-9]+', #owner + 2)
end

if keep_line(q, w) then
  if held or redis.call('ZRANGE', q, 0, 0)[1] ~= owner then
    local now = milliseconds()
    local in_line = give_sign(w, owner, now) and 1 or 0
    if held then return {redis.call('PTTL', lease), in_line} end
    local head, _, left = head_of_line(q, w, now)
    if ARGV[6] == 'fair' and head and head ~= owner then return {left, in_line} end
  end
  leave_line(q, w, owner)
elseif held then
  return {redis.call('PTTL', lease), 0}
end

local token = redis.pcall('INCR', last)
if type(token) == 'table' then return token end
if ARGV[4] == 'hybrid' then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  if now > token then token = now end
end
if token >= 9007199254740992 then return redis.error_reply('TOKENRANGE the next token would not fit into 53 bits') end
local digits = string.format('%.0f', token) -- token .. '' would keep only 14 digits
local kept = retention > 0 and redis.pcall('SET', last, digits, 'PX', retention) or redis.pcall('SET', last, digits)
if kept.err then return kept end
local granted = redis.pcall('SET', lease, owner .. '\0' .. digits .. '\0' .. ARGV[3], 'PX', ttl)
if granted.err then return granted end
return digits
