-- Grants of a name: a lock, a writer, a reader, a permit; their renewals; and their ends by their holders.

-- [name]
-- The keys of the name that a script is about; a script about several names sets them for one after the other. What a
-- script does not need, it does not get. No call of unpack: what a plain lock runs is as short as it can be.
--   lease    who holds: OWNER NUL TOKEN NUL LABEL, or several: see shares.lua
--   last     the last token
--   q, w     the line: see line.lua
--   e, h     several shares: see shares.lua
--   kind     'hybrid' or 'counter'
local lease, last, q, w, e, h = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local kind = ARGV[1]

-- [grant]
local TOKEN_KEPT = 604800000 -- ms after which the last token of an idle name expires; that of a counter is kept for ever

-- Grant the name: return the token in digits, or an error; or nil if another owner holds it, and it is not *free* anyway.
-- The lease is written first: one command finds out whether the name is free, and takes it.
local function grant(lease, last, kind, owner, ttl, label, free, time)
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
  if kind == 'hybrid' then
    before = redis.pcall('SET', last, digits, 'PX', TOKEN_KEPT, 'GET')
  else
    before = redis.pcall('SET', last, digits, 'GET')
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
--   ARGV  kind, owner, ttl in ms, label; for a share also its mode and the number of permits
--   ->    "TOKEN" granted; of a share {"TOKEN", permit or -1} | the ms until another try makes sense (-1: the lease has
--         no ttl)
local owner, ttl, label, mode, permits = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local holder, kept, permit = owner, label, nil
if mode then
  permit = mode == 'permit' and 0 or -1
  holder, kept = '', '=' .. mode .. '\0' .. owner .. '\0' .. permit .. '\0' .. permits .. '\0' .. label
end
local line = redis.pcall('PEXPIRE', q, 12000) -- a write that finds out whether there is a line
if type(line) == 'table' then return line end
if line == 0 then
  local token = grant(lease, last, kind, holder, ttl, kept)
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
if number > readers_to then
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
  local token = grant(lease, last, kind, holder, ttl, kept, false, time)
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

-- [renew]
-- Restart the ttl of every lease that its owner still holds. Never creates a lease, and never revives one.
--   KEYS  leases
--   ARGV  owner and ttl in ms for each
--   ->    one character for each: '1' renewed, '0' there is none, 'x' another owner holds it
local outcomes, renewed = {}, {}
for i, lease in ipairs(KEYS) do
  local owner = ARGV[2 * i - 1]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' and held.err then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = '' -- the key holds something else; the other leases are renewed all the same
  end
  if not held then
    outcomes[i] = '0'
  elseif string.sub(held, 1, #owner + 1) == owner .. '\0' then
    redis.call('PEXPIRE', lease, ARGV[2 * i])
    renewed[#renewed + 1] = lease
    outcomes[i] = '1'
  else
    outcomes[i] = 'x'
  end
end
-- Client tracking follows the keys that are read, so read the renewed leases, after the writes. One command reads
-- all of them, because before Redis 7.2 every read in a script makes the server follow all keys of the script.
if #renewed > 0 then redis.pcall('EXISTS', unpack(renewed)) end
return table.concat(outcomes)

-- [renew shares]
-- As [renew], for shares.
--   KEYS  lease, e and h for each; or of a single one only the lease, or the lease and e, while the slot moves
--   ARGV  owner and ttl in ms for each
local outcomes, now = {}, milliseconds()
for i = 1, math.ceil(#KEYS / 3) do
  lease, e, h = unpack(KEYS, 3 * i - 2, 3 * i)
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = 'x'
  end
  if not is_shared(held) then
    outcomes[i] = held and 'x' or '0'
  elseif is_spread(held) and not e then
    return redis.error_reply('TRYAGAIN the share is in another key')
  else
    outcomes[i] = has_share(held, owner, now) and '1' or '0'
    if outcomes[i] == '1' then extend(held, owner, ttl, now) end
  end
end
return table.concat(outcomes)

-- [check shares]
-- Whether owners still have their shares of a name. Unlike a renewal it changes nothing, so no other client gets a notice.
--   KEYS  lease, e
--   ARGV  owners
--   ->    one character for each, as [renew]
lease, e = KEYS[1], KEYS[2]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if not is_shared(held) then return string.rep(held and 'x' or '0', #ARGV) end
local found, now = {}, milliseconds()
for i, owner in ipairs(ARGV) do found[i] = has_share(held, owner, now) and '1' or '0' end
return table.concat(found)

-- [release]
-- Release the name if the owner holds it. A share goes on in [release beside] where others hold the name; where there is a
-- line, [release in line] serves it.
--   KEYS  lease, last, q, w; for a share, and for an owner that may wait, also e, h; or only the lease, while the slot
--         moves and the others are on another server: then a share in e is not released
--   ARGV  kind, owner; for a share also '1' if it has an entry in h; 'leave' behind that for a waiter that was
--         to be woken only: it leaves the line, and a grant of its owner stays
--   ->    1 released | 0 the owner holds nothing | -1 another owner holds the name
local owner, noted, leaves = ARGV[2], ARGV[3], ARGV[4] == 'leave'
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' then
  return string.find(held.err, '^WRONGTYPE') and -1 or held
end
local released, beside = held and (string.sub(held, 1, #owner + 1) == owner .. '\0' and 1 or -1) or 0, false
if noted and held and string.sub(held, 1, 1) == '\0' then
  local only = string.match(held, '^%z%d+%z=%a+%z(%Z*)%z')
  released, beside = only == owner and 1 or 0, not only
end
if leaves then released, beside = 0, false end
if beside and not KEYS[3] then return redis.error_reply('TRYAGAIN the share is in another key') end
local line = KEYS[3] and redis.call('PEXPIRE', KEYS[3], 12000) == 1
if not line and not beside then
  if released == 1 then redis.call('DEL', KEYS[1]) end
  return released
end

-- [release beside]
local time = redis.call('TIME')
if beside then
  local now, ends = milliseconds(time), redis.call('ZSCORE', e, owner)
  if ends then
    if tonumber(ends) > now then released = 1 end -- else its owner has lost it, although another share keeps the lease
    redis.call('ZREM', e, owner)
    if noted == '1' then redis.call('HDEL', h, owner) end
    drop_ended(now)
    settle(now)
  end
  if not line then return released end
  held = redis.call('GETEX', lease)
end

-- [release in line]
if released == 1 then
  if not beside then held = false end -- serving writes the lease anew, or deletes it
else
  leave_line(owner)
  if is_shared(held) then
    if not e then return released end
    drop_ended(milliseconds(time))
  end
end
local _, failed = serve(held, time)
-- The grant has ended, so a line that cannot be served makes no error of it.
return type(failed) == 'table' and released < 1 and failed or released
