-- Grants of a name.

-- [name]
-- The keys of the name that a script is about; a script about several names sets them for one after the other. What a
-- script does not need, it does not get. No call of unpack: what a plain lock runs is as short as it can be.
--   lease    who holds: OWNER NUL TOKEN NUL LABEL, or several: see shares.lua
--   last     the last token
--   q, w     the line: see line.lua
--   e, h     several shares: see shares.lua
--   kind, retention  'hybrid' or 'counter', and the ms that an idle counter is kept (0: for ever)
local lease, last, q, w, e, h = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local kind, retention = ARGV[1], ARGV[2]

-- [grant]
-- Grant the name: return the token in digits, or an error; or nil if another owner holds it, and it is not *free* anyway.
-- The lease is written first: one command finds out whether the name is free, and takes it.
local function grant(lease, last, kind, retention, owner, ttl, label, free, time)
  local token = 1
  if kind == 'hybrid' then
    time = time or redis.call('TIME')
    token = tonumber(time[1]) * 100000 + math.floor(tonumber(time[2]) / 10) -- 15 digits until 2286
  end
  local digits = string.format('%.0f', token) -- token .. '' would keep only 14 digits
  local taken = redis.pcall('SET', lease, owner .. '\0' .. digits .. '\0' .. label, 'PX', ttl, free and 'GET' or 'NX')
  if not taken and not free then return nil end
  if type(taken) == 'table' and taken.err then return taken end
  local before
  if retention == '0' then
    before = redis.pcall('SET', last, digits, 'GET')
  else
    before = redis.pcall('SET', last, digits, 'PX', retention, 'GET')
  end
  if not before then return digits end
  local higher, problem = tonumber(before), 'ERR the last token is not a number'
  if higher and higher < token then return digits end
  if higher then
    token, problem = higher + 1, 'TOKENRANGE the next token would not fit into 53 bits'
    if token < 9007199254740992 then
      digits = string.format('%.0f', token)
      redis.call('SET', lease, owner .. '\0' .. digits .. '\0' .. label, 'PX', ttl)
      redis.call('SET', last, digits, 'KEEPTTL')
      return digits
    end
  end
  redis.call('DEL', lease)
  if type(before) == 'table' then return before end -- an error: the key is not written
  redis.call('SET', last, before, 'KEEPTTL')
  return redis.error_reply(problem)
end

-- [acquire]
-- Grant, or repeat an earlier grant to the same owner, or refuse. A share goes on in [acquire beside] where others hold the
-- name; where there is a line, [acquire in line] decides.
--   KEYS  lease, last, q, w; for a share also e, h
--   ARGV  kind, retention, owner, ttl in ms, label, 'fair' or 'barge' (a free name goes to the first request); for a
--         share also its mode and the number of permits
--   ->    "TOKEN" granted; of a share {"TOKEN", permit or -1} | the ms until another try makes sense (-1: the lease has
--         no ttl)
local owner, ttl, label, mode, permits = ARGV[3], ARGV[4], ARGV[5], ARGV[7], ARGV[8]
local holder, kept, permit = owner, label, nil
if mode then
  permit = mode == 'permit' and 0 or -1
  holder, kept = '', '=' .. mode .. '\0' .. owner .. '\0' .. permit .. '\0' .. permits .. '\0' .. label
end
local line = redis.pcall('PEXPIRE', q, 12000) -- a write that finds out whether there is a line
if type(line) == 'table' then return line end
if line == 0 then
  local token = grant(lease, last, kind, retention, holder, ttl, kept)
  if token then return permit and type(token) == 'string' and {token, permit} or token end
end

-- GETEX reads, but counts as a write: a replica refuses it, and client tracking does not follow the key.
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if held and string.sub(held, 1, #owner + 1) == owner .. '\0' then
  redis.call('PEXPIRE', lease, ttl)
  return string.match(held, '^[0-9]+', #owner + 2)
end
if not mode and (held or line == 0) then return redis.call('PTTL', lease) end

-- [acquire beside]
-- Repeat a share, refuse it, or grant it beside others where there is no line.
local time = redis.call('TIME')
local now = milliseconds(time)
if is_shared(held) then
  if is_spread(held) then drop_ended(now) end
  if has_share(held, owner, now) then
    extend(held, owner, ttl, now)
    return {share_of(held, owner)}
  end
end
if not has_room(held, mode, permits) then
  local first = is_shared(held) and is_spread(held) and redis.call('ZRANGE', e, 0, 0, 'WITHSCORES')[2]
  return first and math.ceil(tonumber(first) - now) or redis.call('PTTL', lease)
end
if line == 0 then return share(held, owner, ttl, mode, permits, label, time) end

-- [acquire in line]
-- There is room. Is it the owner's turn?
local BOUNDARY = 16 -- of the readers that may get in the last ones, each of which wakes those behind: some may be dead
local number, readers_to = math.huge, 0
if mode == 'reader' then number, readers_to = number_in_line(owner) end
if number > readers_to and ARGV[6] == 'fair' then
  local handed, left, turn = serve(held, time, {[owner] = true})
  if type(left) == 'table' then return left end
  if handed == owner then return string.match(redis.call('GETEX', lease), '^[0-9]+', #owner + 2) end
  if handed then return redis.call('PTTL', lease) end
  if mode == 'reader' then number, readers_to = number_in_line(owner) end
  if left and turn ~= owner and number > readers_to then return left end
end

local granted
if held then
  granted = share(held, owner, ttl, mode, permits, label, time)
else
  local token = grant(lease, last, kind, retention, holder, ttl, kept, false, time)
  granted = permit and type(token) == 'string' and {token, permit} or token
end
if granted.err then return granted end
leave_line(owner)
if mode == 'permit' then
  serve(redis.call('GETEX', lease), time)
elseif mode == 'reader' and number > readers_to - BOUNDARY then
  open_to_readers(readers_to)
end
return granted
