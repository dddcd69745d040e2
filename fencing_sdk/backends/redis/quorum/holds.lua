-- The hold of one lock on one node, what the node remembers of its quorum, and each atomic step that a client takes there.

-- [hold]
-- The hold is a key: owner NUL number NUL token NUL attempt NUL digest NUL label
--   number   what this node gave the hold; no later hold on this node has one as low
--   token    the token of the lease; until it is confirmed, the number
--   attempt  the attempt that has asked for the hold last
--   digest   of the owner, for those who look

-- Whether the node may vote: it remembers the epoch. GETEX reads, but counts as a write, which a replica refuses.
local function votes(key, epoch)
  return redis.call('GETEX', key) == epoch
end

local NO_VOTE = redis.error_reply('EPOCH this node has another epoch, or has lost its memory')

-- Return the hold, or nil and perhaps an error: the key may hold something else.
local function read_hold(key)
  local found = redis.pcall('GETEX', key)
  if type(found) == 'table' then return nil, found end
  if not found then return nil end
  local owner, number, token, attempt, digest, label =
    string.match(found, '^(%Z*)%z(%d+)%z(%d+)%z(%d+)%z(%Z*)%z(.*)$')
  return {owner = owner, number = number, token = token, attempt = attempt, digest = digest, label = label}
end

local function is_something_else(failed)
  return string.find(failed.err, '^WRONGTYPE')
end

local function write_hold(key, held, ttl)
  local hold = table.concat({held.owner, held.number, held.token, held.attempt, held.digest, held.label}, '\0')
  return redis.pcall('SET', key, hold, 'PX', ttl)
end

-- The milliseconds for which a hold lives on: a sign of life never shortens.
local function longer(key, ttl)
  return math.max(tonumber(ttl), redis.call('PTTL', key))
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

-- [grant]
-- Grant, repeat an earlier grant to the same owner, or refuse.
--   KEYS  epoch, counter, hold
--   ARGV  epoch, owner, ttl in ms, hint and number of the attempt, digest, label
--   ->    "NUMBER" granted | {ms left, "TOKEN", "ATTEMPT" of the hold in the way}
local key, owner, attempt = KEYS[3], ARGV[2], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return NO_VOTE end
local held, failed = read_hold(key)
if failed then return failed end
if held and held.owner ~= owner then return {redis.call('PTTL', key), held.token, held.attempt} end
if held then -- the number stays: the hold is unbroken
  held.attempt = attempt
else
  local number = next_number(KEYS[2], attempt)
  if not number then return redis.error_reply('TOKENRANGE the next token would not fit into 53 bits') end
  held = {owner = owner, number = number, token = number, attempt = attempt, digest = ARGV[5], label = ARGV[6]}
end
local written = write_hold(key, held, longer(key, ARGV[3]))
return written.err and written or held.number

-- [confirm]
-- Raise a hold, and the counter, to the token of the lease. Neither ever falls.
--   KEYS  epoch, counter, hold
--   ARGV  epoch, owner, number of the hold, token, ttl in ms
--   ->    1 | 0 it is another hold now
local key, number, token = KEYS[3], ARGV[3], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return NO_VOTE end
local held, failed = read_hold(key)
if failed then return failed end
if not held or held.owner ~= ARGV[2] or held.number ~= number then return 0 end
if tonumber(token) > tonumber(number) then number = token end
if tonumber(redis.call('GETEX', KEYS[2]) or '0') < tonumber(number) then redis.call('SET', KEYS[2], number) end
held.number, held.token = number, token
local written = write_hold(key, held, longer(key, ARGV[5]))
return written.err and written or 1

-- [undo]
-- Delete the hold of an attempt that was not won.
--   KEYS  hold
--   ARGV  owner, attempt
--   ->    1 deleted | 0 this attempt has no hold
local held, failed = read_hold(KEYS[1])
if failed then return failed end
if not held or held.owner ~= ARGV[1] or held.attempt ~= ARGV[2] then return 0 end
return redis.call('DEL', KEYS[1])

-- [keep]
-- Let every hold that is unbroken live on. Never creates a hold, never revives one, and never shortens its life.
--   KEYS  epoch, holds
--   ARGV  epoch; for each hold: owner, number of the hold (=TOKEN: that of the lease; '': any), ttl in ms
--   ->    one character for each: '1' kept, '0' there is none, 'n' a later hold of the owner, 'x' another owner's
if not votes(KEYS[1], ARGV[1]) then return NO_VOTE end
local outcomes = {}
for i = 2, #KEYS do
  local owner, number, key = ARGV[3 * i - 4], ARGV[3 * i - 3], KEYS[i]
  local held, failed = read_hold(key)
  if failed and not is_something_else(failed) then return failed end -- else the others are kept all the same
  if not held then
    outcomes[i - 1] = failed and 'x' or '0'
  elseif held.owner ~= owner then
    outcomes[i - 1] = 'x'
  elseif number ~= '' and number ~= held.number and number ~= '=' .. held.token then
    outcomes[i - 1] = 'n'
  else
    redis.call('PEXPIRE', key, longer(key, ARGV[3 * i - 2]))
    outcomes[i - 1] = '1'
  end
end
return table.concat(outcomes)

-- [heal]
-- Give leases that a majority has kept a new hold on this node, which has lost theirs: but not if they were ended.
--   KEYS  epoch; for each lease: counter, hold, note
--   ARGV  epoch, hint; for each lease: owner, token, ttl in ms, digest, label
--   ->    for each lease the number of its hold, or '0': another owner has the lock here, or an operator has ended it
if not votes(KEYS[1], ARGV[1]) then return NO_VOTE end
local numbers = {}
for i = 1, (#KEYS - 1) / 3 do
  local counter, key, note = unpack(KEYS, 3 * i - 1, 3 * i + 1)
  local owner, token, ttl, digest, label = unpack(ARGV, 5 * i - 2, 5 * i + 2)
  local held, failed = read_hold(key)
  local noted = redis.call('GETEX', note)
  local number
  if failed or (noted and string.match(noted, '^%d+') == token) then
    number = nil
  elseif held then
    number = held.owner == owner and held.number
  else
    number = next_number(counter, ARGV[2])
  end
  held = {owner = owner, number = number, token = token, attempt = ARGV[2], digest = digest, label = label}
  numbers[i] = number and not write_hold(key, held, longer(key, ttl)).err and number or '0'
end
return numbers

-- [give back]
-- Delete the owner's hold, whatever its number, or let it stand for exactly so long, where no request of the owner
-- reaches it.
--   KEYS  hold
--   ARGV  owner, ms for which it stands, digest of its owner then
--   ->    1 done | 0 there is no hold | -1 another owner has it
local key, owner, after = KEYS[1], ARGV[1], tonumber(ARGV[2])
local held, failed = read_hold(key)
if failed then return is_something_else(failed) and -1 or failed end
if not held then return 0 end
if held.owner == '-' .. owner then return 1 end
if held.owner ~= owner then return -1 end
if after == 0 then return redis.call('DEL', key) end
held.owner, held.digest = '-' .. owner, ARGV[3]
local written = write_hold(key, held, after)
return written.err and written or 1

-- [see]
-- Describe holds. Reads alone, so that a node answers that takes no writes for a while.
--   KEYS  the hold of each lock
--   ->    for each: nil if it is free here | {"TOKEN", ms left, digest, "ATTEMPT", label}
local found = {}
for i, key in ipairs(KEYS) do
  local hold = redis.pcall('GET', key)
  if type(hold) == 'table' then -- among others, a key that holds something else counts as free
    if #KEYS == 1 or not string.find(hold.err, '^WRONGTYPE') then return hold end
    hold = false
  end
  local token, attempt, digest, label = string.match(hold or '', '^%Z*%z%d+%z(%d+)%z(%d+)%z(%Z*)%z(.*)$')
  found[i] = token and {token, redis.call('PTTL', key), digest, attempt, label} or false
end
return found

-- [end]
-- Delete the hold that an owner has for a token, and note the reason.
--   KEYS  hold, note
--   ARGV  digest of the owner, token, this request, reason, ms for which the operator waits for the other nodes
--   ->    the request that came first and has deleted the hold; '' if there was none to delete then
-- The note stands for longer than the operator waits, and than the hold would have lasted. Meanwhile the holder gets no
-- new hold here ([heal]).
local hold, note = unpack(KEYS)
local digest, token, request, reason, patience = unpack(ARGV)
local NOTED = 60000 -- ms for which a note is kept longer than both
local held, failed = read_hold(hold)
if failed and not is_something_else(failed) then return failed end
held = held and held.digest == digest and held.token == token
local noted = redis.call('GETEX', note)
local first = noted and string.match(noted, '^' .. token .. '%z(%Z*)%z')
if not first then
  first = held and request or ''
  local kept = longer(hold, patience) + NOTED
  redis.call('SET', note, table.concat({token, first, reason}, '\0'), 'PX', kept)
end
if held then redis.call('DEL', hold) end
return first

-- [noted]
-- Return why tickets were ended.
--   KEYS  the note of each: token NUL request NUL reason
--   ->    for each the reason, or '' if there is no note
local reasons = {}
for i, key in ipairs(KEYS) do
  local noted = redis.pcall('GET', key)
  reasons[i] = type(noted) == 'string' and string.match(noted, '^%d+%z%Z*%z(.*)$') or ''
end
return reasons

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
