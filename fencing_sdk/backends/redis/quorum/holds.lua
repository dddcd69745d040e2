-- The hold of one lock on one node, how a client takes, keeps and releases it, and the line of those that wait for it.

-- [hold]
-- The hold is a key: owner NUL number NUL token NUL attempt NUL label
--   number   what this node gave the hold; no later hold on this node has one as low
--   token    the token of the lease; until it is confirmed, the number
--   attempt  the attempt that has asked for the hold last

-- Whether the node may vote: it remembers the epoch. GETEX reads, but counts as a write: client tracking does not follow it.
local function votes(key, epoch)
  return redis.call('GETEX', key) == epoch
end

local NO_VOTE = 'EPOCH this node has another epoch, or has lost its memory'

local function read_hold(hold)
  local owner, number, token, attempt, label = string.match(hold, '^(%Z*)%z(%d+)%z(%d+)%z(%d+)%z(.*)$')
  return {owner = owner, number = number, token = token, attempt = attempt, label = label}
end

local function write_hold(key, owner, number, token, attempt, label, ttl)
  local hold = table.concat({owner, number, token, attempt, label}, '\0')
  return redis.pcall('SET', key, hold, 'PX', ttl)
end

-- Take the next number from the counter: the hint, if it is higher, but at most an hour ahead of this node's clock.
local function next_number(counter, hint)
  local number = (tonumber(redis.call('GETEX', counter)) or 0) + 1
  if tonumber(hint) > number then
    local ahead = (tonumber(redis.call('TIME')[1]) + 3600) * 100000
    number = math.max(number, math.min(tonumber(hint), ahead))
  end
  if number >= 9007199254740992 then return nil end
  local digits = string.format('%.0f', number) -- number .. '' would keep only 14 digits
  redis.call('SET', counter, digits)
  return digits
end

local TOKEN_RANGE = 'TOKENRANGE the next token would not fit into 53 bits'

-- [grant]
-- Grant, repeat an earlier grant to the same owner, or refuse.
--   KEYS  epoch, counter, hold, q, w
--   ARGV  epoch, owner, ttl in ms, hint and number of the attempt, label
--   ->    "NUMBER" granted | {ms left, 1 if the owner is in the line, "TOKEN", "ATTEMPT" of the hold in the way}
local key, q, w, owner, ttl, attempt = KEYS[3], KEYS[4], KEYS[5], ARGV[2], ARGV[3], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local found = redis.pcall('GETEX', key)
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)

if held and held.owner == owner then -- the number stays: the hold is unbroken
  local repeated = write_hold(key, owner, held.number, held.token, attempt, held.label, ttl)
  return repeated.err and repeated or held.number
end

local in_line = 0
if keep_line(q, w) then
  local now = milliseconds()
  if give_sign(w, owner, now) then in_line = 1 end
  local head, left = head_of_line(q, w, now)
  if not held and head and head ~= owner then return {left, in_line, '0', '0'} end
end
if held then return {redis.call('PTTL', key), in_line, held.token, held.attempt} end

local number = next_number(KEYS[2], attempt)
if not number then return redis.error_reply(TOKEN_RANGE) end
local written = write_hold(key, owner, number, number, attempt, ARGV[5], ttl)
if written.err then return written end
if in_line == 1 then leave_line(q, w, owner) end
return number

-- [confirm]
-- Raise a hold, and the counter, to the token of the lease. Neither ever falls.
--   KEYS  epoch, counter, hold
--   ARGV  epoch, owner, number of the hold, token, ttl in ms
--   ->    1 | 0 it is another hold now
local key, number, token = KEYS[3], ARGV[3], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local found = redis.pcall('GETEX', key)
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)
if not held or held.owner ~= ARGV[2] or held.number ~= number then return 0 end
if tonumber(token) > tonumber(number) then number = token end
if tonumber(redis.call('GETEX', KEYS[2]) or '0') < tonumber(number) then redis.call('SET', KEYS[2], number) end
local written = write_hold(key, held.owner, number, token, held.attempt, held.label, ARGV[5])
return written.err and written or 1

-- [undo]
-- Delete the hold of an attempt that was not won, and let a waiter stand in the line where it was.
--   KEYS  hold, q, w
--   ARGV  owner, attempt; for a waiter also: score in the line, channel, ticket
--   ->    1 deleted | 0 this attempt has no hold
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)
if not held or held.owner ~= ARGV[1] or held.attempt ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[3] then enter_line(KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4], ARGV[5]) end
return 1

-- [renew]
-- Restart the ttl of every hold that is unbroken. Never creates a hold, and never revives one.
--   KEYS  epoch, holds
--   ARGV  epoch; for each hold: owner, number ('': any), ttl in ms
--   ->    one character for each: '1' renewed, '0' there is none, 'n' a later hold of the owner, 'x' another owner's
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local outcomes, renewed = {}, {}
for i = 2, #KEYS do
  local owner, number = ARGV[3 * i - 4], ARGV[3 * i - 3]
  local found = redis.pcall('GETEX', KEYS[i])
  if type(found) == 'table' and found.err then
    if not string.find(found.err, '^WRONGTYPE') then return found end
    found = '' -- the key holds something else; the other holds are renewed all the same
  end
  local held = found and read_hold(found)
  if not held then
    outcomes[i - 1] = '0'
  elseif held.owner ~= owner then
    outcomes[i - 1] = 'x'
  elseif number ~= '' and held.number ~= number then
    outcomes[i - 1] = 'n'
  else
    redis.call('PEXPIRE', KEYS[i], ARGV[3 * i - 2])
    renewed[#renewed + 1] = KEYS[i]
    outcomes[i - 1] = '1'
  end
end
-- Client tracking follows the keys that are read last: see [renew] for one server.
if #renewed > 0 then redis.pcall('EXISTS', unpack(renewed)) end
return table.concat(outcomes)

-- [heal]
-- Give leases that a majority has renewed a new hold on this node, which has lost theirs: but not if they were revoked.
--   KEYS  epoch; for each lease: counter, hold, note
--   ARGV  epoch, hint; for each lease: owner, token, attempt, ttl in ms, label
--   ->    for each lease the number of its hold, or '0': another owner has the lock here, or it was revoked
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local numbers, made = {}, {}
for i = 1, (#KEYS - 1) / 3 do
  local counter, key, note = unpack(KEYS, 3 * i - 1, 3 * i + 1)
  local owner, token, attempt, ttl, label = unpack(ARGV, 5 * i - 2, 5 * i + 2)
  local found = redis.pcall('GETEX', key)
  local noted = redis.call('GETEX', note)
  local revoked = noted and string.match(noted, '^%d+') == token
  local readable = type(found) ~= 'table' and not revoked
  local held = readable and found and read_hold(found)
  local number
  if held then
    number = held.owner == owner and held.number
  elseif readable then
    number = next_number(counter, ARGV[2])
  end
  if number and not write_hold(key, owner, number, token, attempt, label, ttl).err then
    made[#made + 1] = key
    numbers[i] = number
  else
    numbers[i] = '0'
  end
end
if #made > 0 then redis.pcall('EXISTS', unpack(made)) end
return numbers

-- [release]
-- Release the owner's hold, whatever its number, and wake the head of the line.
--   KEYS  hold, q, w
--   ARGV  owner
--   ->    1 released | 0 there is no hold | -1 another owner has it
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then
  return string.find(found.err, '^WRONGTYPE') and -1 or found
end
if not found then return 0 end
if read_hold(found).owner ~= ARGV[1] then return -1 end
redis.call('DEL', KEYS[1])
wake_head(KEYS[2], KEYS[3])
return 1

-- [line]
--   q  sorted set: owner -> number of arrival. It is the client's, so that all nodes have one order
--   w  hash: owner -> "MILLISECONDS CHANNEL TICKET": its last sign of life, and the message that wakes it

-- Postpone the expiry of the line; return whether it may have waiters. A write: client tracking does not follow it.
local function keep_line(q, w)
  if redis.call('PEXPIRE', q, LINE_KEPT) == 0 then return false end
  redis.call('PEXPIRE', w, LINE_KEPT)
  return true
end

-- Note a sign of life of the owner; return whether it is in the line.
local function give_sign(w, owner, now)
  local sign = redis.call('HGET', w, owner)
  if not sign then return false end
  redis.call('HSET', w, owner, (string.gsub(sign, '^[0-9]+', string.format('%.0f', now), 1)))
  return true
end

local function leave_line(q, w, owner)
  redis.call('ZREM', q, owner)
  if redis.call('EXISTS', q) == 1 then redis.call('HDEL', w, owner) else redis.call('DEL', w) end
end

-- Return the owner whose turn it is, the milliseconds until it counts as gone, and the message that wakes it.
local function head_of_line(q, w, now)
  while true do
    local head = redis.call('ZRANGE', q, 0, 0)[1]
    if not head then return nil end
    local sign = redis.call('HGET', w, head)
    local at, channel, ticket = string.match(sign or '', '^(%d+) (%Z+) (%d+)$')
    local age = now - (tonumber(at) or 0)
    if is_alive(age) then return head, LINE_TTL - age, channel, ticket end
    leave_line(q, w, head)
  end
end

local function wake_head(q, w)
  if not keep_line(q, w) then return end
  local head, _, channel, ticket = head_of_line(q, w, milliseconds())
  if head then redis.pcall('PUBLISH', channel, ticket) end -- if this is not permitted, the waiter polls
end

-- [place]
local function enter_line(q, w, owner, score, channel, ticket)
  local joined = redis.pcall('ZADD', q, 'NX', score, owner)
  if type(joined) == 'table' then return joined end
  redis.call('HSET', w, owner, string.format('%.0f', milliseconds()) .. ' ' .. channel .. ' ' .. ticket)
  keep_line(q, w)
  return 1
end

-- [join]
-- Put the owner into the line, unless it is in the line already, or holds the lock.
--   KEYS  hold, q, w
--   ARGV  owner, score in the line, channel, ticket
--   ->    1 in the line | 0 the owner holds the lock
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
if found and read_hold(found).owner == ARGV[1] then return 0 end
return enter_line(KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])

-- [leave]
-- Remove the owner from the line. If the lock is free here, wake the head of the line: the turn may have been the owner's.
--   KEYS  hold, q, w
--   ARGV  owner
--   ->    1
local found = redis.pcall('GETEX', KEYS[1])
if type(found) == 'table' and found.err then return found end
leave_line(KEYS[2], KEYS[3], ARGV[1])
if not found then wake_head(KEYS[2], KEYS[3]) end
return 1
