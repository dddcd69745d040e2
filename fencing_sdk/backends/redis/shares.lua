-- Permits and readers, which hold a name together.

-- [shares]
--   lease  while the name is shared: NUL TOKEN NUL '=' MODE, as if an owner with an empty id held a lock. It expires with
--          the share that lasts longest, so that locks and writers are refused by what they read anyway. While one share
--          was never joined by another, it stands in the lease: NUL OWNER NUL PERMIT NUL PERMITS NUL LABEL. The
--          second share spreads them to e and h:
--   e      sorted set: owner -> when its share ends, in ms since 1970
--   h      hash: owner -> "TOKEN PERMIT PERMITS LABEL"; a reader has the permit -1, and has an entry only if it has a label
-- The shares are over if the lease is gone or has another owner: an operator may have deleted it. What e and h have is
-- void while one share stands in the lease.

local function is_shared(held)
  return held and string.sub(held, 1, 1) == '\0'
end

-- Return the lease without its share; then owner, permit, permits and label of the share, if one stands in it.
local function read_shared(held)
  return string.match(held, '^(%z%d+%z=%a+)%z?(%Z*)%z?(-?%d*)%z?(%d*)%z?(.*)$')
end

local function is_spread(held)
  return select(2, read_shared(held)) == ''
end

local function drop_ended(now)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', e, '-inf', string.format('%.0f', now))) do
    redis.call('ZREM', e, owner)
    redis.call('HDEL', h, owner)
  end
end

-- Let the lease and the shares in e and h last as long as the last share.
local function settle(now)
  local last_end = redis.call('ZREVRANGE', e, 0, 0, 'WITHSCORES')[2]
  if not last_end then
    redis.call('DEL', lease, e, h)
    return
  end
  local left = string.format('%.0f', tonumber(last_end) - now)
  redis.call('PEXPIRE', lease, left)
  redis.call('PEXPIRE', e, left)
  if h then redis.call('PEXPIRE', h, left) end
end

-- Whether a claim fits beside the holders, once those that ended are removed. A lock and a writer fit beside no other.
local function has_room(held, mode, permits)
  if not held then return true end
  if not is_shared(held) or string.match(held, '^%z%d+%z=(%a+)') ~= mode then return false end
  if mode == 'reader' then return true end
  return (is_spread(held) and redis.call('ZCARD', e) or 1) < tonumber(permits)
end

local function has_share(held, owner, now)
  local _, only = read_shared(held)
  if only ~= '' then return only == owner end
  local ends = redis.call('ZSCORE', e, owner)
  return ends and tonumber(ends) > now
end

local function extend(held, owner, ttl, now)
  if is_spread(held) then
    redis.call('ZADD', e, string.format('%.0f', now + ttl), owner)
    settle(now)
  else
    redis.call('PEXPIRE', lease, ttl)
  end
end

-- [sharing]
-- What grants and revocations need besides.
local function note_share(owner, ends, token, permit, permits, label)
  redis.call('ZADD', e, string.format('%.0f', ends), owner)
  if tonumber(permit) < 0 and label == '' then return end
  redis.call('HSET', h, owner, token .. ' ' .. permit .. ' ' .. permits .. ' ' .. label)
end

-- Move the share that stands in the lease to e and h; return the lease.
local function spread(held, now)
  local rest, owner, permit, permits, label = read_shared(held)
  if owner == '' then return held end
  redis.call('DEL', e, h)
  note_share(owner, now + redis.call('PTTL', lease), string.match(held, '^%z(%d+)'), permit, permits, label)
  redis.call('SET', lease, rest, 'KEEPTTL')
  return rest
end

-- [share]
-- Return token and permit of an owner that has a share.
local function share_of(held, owner)
  local token = string.match(held, '^%z(%d+)')
  local _, only, permit = read_shared(held)
  if only ~= '' then return token, tonumber(permit) end
  local own, number = string.match(redis.call('HGET', h, owner) or '', '^(%d+) (-?%d+) ')
  return own or token, tonumber(number or -1)
end

-- Draw the token of a permit beside others: return it, or an error; then the lease is as it was.
local function draw_beside(held, ttl, now, time)
  local token = grant(lease, last, kind, '', ttl, '=permit', true, time)
  if type(token) == 'table' then
    redis.call('SET', lease, held)
    settle(now)
  end
  return token
end

-- Grant a share beside others: return {token, permit or -1}, or an error. Readers share the token of the first one; a
-- permit gets a token of its own, and the lowest free number.
local function share(held, owner, ttl, mode, permits, label, time)
  local now = milliseconds(time)
  held = spread(held, now)
  local token, permit = string.match(held, '^%z(%d+)'), -1
  if mode == 'permit' then
    token = draw_beside(held, ttl, now, time)
    if type(token) == 'table' then return token end
    local taken = {}
    for _, entry in ipairs(redis.call('HVALS', h)) do taken[string.match(entry, '^%d+ (%d+) ')] = true end
    permit = 0
    while taken[tostring(permit)] do permit = permit + 1 end
  end
  note_share(owner, now + ttl, token, permit, permits, label)
  settle(now)
  return {token, permit}
end
