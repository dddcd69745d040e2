-- What operators see and do, what holders hear of it, and how a grant passes to another owner. Nothing of it runs while names are acquired, renewed and released.

-- [inspect]
-- Return the lease, the ms until it ends, and the server's time.
--   KEYS  lease
--   ->    {lease, ms left, server's time in microseconds} | nil
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' or not held then return held end
local time = redis.call('TIME')
return {held, redis.call('PTTL', KEYS[1]), time[1] .. string.format('%06d', time[2])}

-- [describe]
-- How many wait, and who shares the name.
local COUNTED = 64 -- in a longer line, waiters that have gone without leaving are counted too
local time = redis.call('TIME')
local now, micros = milliseconds(time), time[1] .. string.format('%06d', time[2])

-- Return how many wait; without a permission for it nil, and the error.
local function count_line()
  local count = redis.pcall('ZCARD', q)
  if type(count) == 'table' then
    if string.find(count.err, '^WRONGTYPE') then return 0 end
    return nil, count
  end
  if count == 0 or count > COUNTED then return count end
  local signs = redis.pcall('HVALS', w)
  if signs.err then return nil, signs end
  count = 0
  for _, sign in ipairs(signs) do
    if is_alive(now - (tonumber(string.match(sign, '^%d+')) or 0)) then count = count + 1 end
  end
  return count
end

-- Describe a name that is held: {lease, ms left, *waiters*, server's time in microseconds, then for each share its owner,
-- the ms until it ends, and its entry in h}.
local function described(held, waiters)
  local left = redis.call('PTTL', lease)
  local found = {held, left, waiters, micros}
  if not is_shared(held) then return found end
  local token, _, owner, permit, permits, label = string.match(held, '^%z(%d+)'), read_shared(held)
  local ends = {owner, now + left}
  if owner == '' then ends = redis.call('ZRANGEBYSCORE', e, string.format('(%.0f', now), '+inf', 'WITHSCORES') end
  for i = 1, #ends, 2 do
    local entry = owner ~= '' and token .. ' ' .. permit .. ' ' .. permits .. ' ' .. label
    found[#found + 1] = ends[i]
    found[#found + 1] = math.ceil(tonumber(ends[i + 1]) - now)
    found[#found + 1] = entry or redis.call('HGET', h, ends[i]) or token .. ' -1 0 '
  end
  return found
end

-- [holders]
-- Describe one name and all who hold it.
--   KEYS  lease, q, w, e, h
--   ->    as [listed] for one name; without a permission to count the waiters -1 instead of them
lease, q, w, e, h = unpack(KEYS)
local held = redis.pcall('GET', lease)
if type(held) == 'table' or not held then return held end
return described(held, (count_line()) or -1)

-- [listed]
-- Describe names for a listing.
--   KEYS  lease, q, w, e, h of each
--   ->    for each: nil if it is free, or else what [describe] returns
local found = {}
for i = 1, #KEYS, 5 do
  lease, q, w, e, h = unpack(KEYS, i, i + 4)
  local held = redis.pcall('GET', lease)
  if type(held) == 'table' then -- it holds something else; or a permission is missing, and the listing would lack a lock
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = false
  end
  if held then
    local waiters, refused = count_line()
    if refused then return refused end
    held = described(held, waiters)
  end
  found[#found + 1] = held
end
return found

-- [waiting]
-- Return a stretch of a line, in order of arrival.
--   KEYS  q, w
--   ARGV  number of arrival after which it begins, most waiters
--   ->    {number of arrival, owner, sign of life, ...}
local arrivals = redis.pcall('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if arrivals.err then return arrivals end
local now, found = milliseconds(redis.call('TIME')), {}
for i = 1, #arrivals, 2 do
  local sign = redis.call('HGET', KEYS[2], arrivals[i]) or ''
  found[#found + 1] = arrivals[i + 1]
  found[#found + 1] = arrivals[i]
  found[#found + 1] = is_alive(now - (tonumber(string.match(sign, '^%d+')) or 0)) and sign or ''
end
return found

-- [note]
local NOTED = 1000 -- ms for which a reason is kept longer than the grant would have lasted

-- Keep why a grant was ended, of which so many ms were left.
local function note(x, owner, left, reason)
  redis.call('HSET', x, owner, reason)
  redis.call('PEXPIRE', x, math.max(redis.call('PTTL', x), NOTED + math.max(0, math.ceil(left))))
end

-- [revoke]
-- End every grant that has this token, note the reason for its holders, and serve the line. The last token stays, so the
-- next grant has a higher one.
--   KEYS  lease, last, q, w, e, h, x
--   ARGV  kind, token, reason
--   ->    1 a grant had this token, and has ended | 0 no grant has it
local x, wanted, reason = KEYS[7], ARGV[2], ARGV[3]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if not held then return 0 end
local time = redis.call('TIME')
local now = milliseconds(time)
if is_shared(held) then
  held = spread(held, now)
  settle(now)
end

local token = string.match(held, '^%Z*%z(%d+)%z')
if not is_shared(held) then
  if token ~= wanted then return 0 end
  note(x, string.match(held, '^%Z*'), redis.call('PTTL', lease), reason)
  redis.call('DEL', lease)
elseif string.match(held, '=(%a+)$') == 'reader' then
  if token ~= wanted then return 0 end
  local ends = redis.call('ZRANGE', e, 0, -1, 'WITHSCORES')
  for i = 1, #ends, 2 do note(x, ends[i], tonumber(ends[i + 1]) - now, reason) end
  redis.call('DEL', lease, e, h)
else
  drop_ended(now)
  local owner
  local entries = redis.call('HGETALL', h)
  for i = 1, #entries, 2 do
    if string.match(entries[i + 1], '^%d+') == wanted then owner = entries[i] end
  end
  local ends = owner and redis.call('ZSCORE', e, owner)
  if not ends then return 0 end
  note(x, owner, tonumber(ends) - now, reason)
  redis.call('ZREM', e, owner)
  redis.call('HDEL', h, owner)
  settle(now)
end
-- The grant has ended, so a line that cannot be read makes no error of it.
if redis.call('EXISTS', q) == 1 then serve(redis.call('GETEX', lease), time) end
return 1

-- [transfer]
-- Pass the grant of one owner to another, in its mode and with its number, under a token of its own; readers keep theirs.
-- A call that is repeated finds the heir as the owner. The line stays as it is, because no room was freed.
--   KEYS  lease, last, q, w, e, h, x
--   ARGV  kind, owner, heir, ttl in ms, label, reason for the former owner
--   ->    "TOKEN", of a share {"TOKEN", permit or -1} | 0 the owner holds nothing | -1 another owner holds the name
local x, owner, heir, ttl, label, reason = KEYS[7], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if not held then return 0 end
local time = redis.call('TIME')
local now = milliseconds(time)

if not is_shared(held) then
  local holder, token = string.match(held, '^(%Z*)%z(%d+)%z')
  if holder == heir then
    redis.call('PEXPIRE', lease, ttl)
    return token
  end
  if holder ~= owner then return -1 end
  local left = redis.call('PTTL', lease)
  token = grant(lease, last, kind, heir, ttl, label, true, time)
  if type(token) == 'table' then
    redis.call('SET', lease, held, 'PX', left)
    return token
  end
  note(x, owner, left, reason)
  return token
end

held = spread(held, now)
drop_ended(now)
settle(now)
if redis.call('ZSCORE', e, heir) then
  extend(held, heir, ttl, now)
  return {share_of(held, heir)}
end
local ends = redis.call('ZSCORE', e, owner)
if not ends then return 0 end
local token, permit = share_of(held, owner)
local permits = string.match(redis.call('HGET', h, owner) or '', '^%d+ %-?%d+ (%d+) ') or '0'
if permit >= 0 then
  token = draw_beside(held, ttl, now, time)
  if type(token) == 'table' then return token end
end
redis.call('ZREM', e, owner)
redis.call('HDEL', h, owner)
note_share(heir, now + ttl, token, permit, permits, label)
settle(now)
note(x, owner, tonumber(ends) - now, reason)
return {token, permit}

-- [revoked]
-- Return the reason for which an owner's grant was revoked.
--   KEYS  x: a hash, owner -> reason
--   ARGV  owner
--   ->    reason | nil
local reason = redis.pcall('HGET', KEYS[1], ARGV[1])
return type(reason) == 'string' and reason or nil
