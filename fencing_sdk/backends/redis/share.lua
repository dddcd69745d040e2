-- Permits and readers: functions for the scripts of shares, which also use those of the line.
--   lease  while the name is shared: NUL TOKEN NUL '=' MODE, as if an owner with an empty id held a lock. It expires with
--          the share that lasts longest, so the scripts of plain locks refuse by what they read anyway. While one
--          share was never joined by another, it stands in the lease: NUL OWNER NUL PERMIT NUL PERMITS NUL METADATA
--   e      sorted set: owner -> when its share ends, in ms since 1970
--   h      hash: owner -> "TOKEN PERMIT PERMITS METADATA"; a reader has the permit -1, and no entry without metadata
-- The shares are over if the lease is gone or has another owner: an operator may have deleted it. What e and h have is
-- void while one share stands in the lease.

local function is_shared(held)
  return held and string.sub(held, 1, 1) == '\0'
end

-- Return the lease without its share; then owner, permit, permits and metadata of the share, if one stands in it.
local function read_shared(held)
  return string.match(held, '^(%z%d+%z=%a+)%z?(%Z*)%z?(-?%d*)%z?(%d*)%z?(.*)$')
end

local function note(e, h, owner, ends, token, permit, permits, metadata)
  redis.call('ZADD', e, string.format('%.0f', ends), owner)
  if tonumber(permit) < 0 and metadata == '' then return end
  redis.call('HSET', h, owner, token .. ' ' .. permit .. ' ' .. permits .. ' ' .. metadata)
end

-- Move the share that stands in the lease to e and h; return the lease.
local function spread(lease, held, e, h, now)
  local rest, owner, permit, permits, metadata = read_shared(held)
  if owner == '' then return held end
  redis.call('DEL', e, h)
  note(e, h, owner, now + redis.call('PTTL', lease), string.match(held, '^%z(%d+)'), permit, permits, metadata)
  redis.call('SET', lease, rest, 'KEEPTTL')
  return rest
end

-- Append to *found*, for each share: its owner, the ms until it ends, and its entry in h.
local function add_shares(found, held, left, e, h, now)
  if not is_shared(held) then return end
  local token, _, owner, permit, permits, metadata = string.match(held, '^%z(%d+)'), read_shared(held)
  local ends = {owner, now + left}
  if owner == '' then ends = redis.call('ZRANGEBYSCORE', e, string.format('(%.0f', now), '+inf', 'WITHSCORES') end
  for i = 1, #ends, 2 do
    local entry = owner ~= '' and token .. ' ' .. permit .. ' ' .. permits .. ' ' .. metadata
    found[#found + 1] = ends[i]
    found[#found + 1] = math.ceil(tonumber(ends[i + 1]) - now)
    found[#found + 1] = entry or redis.call('HGET', h, ends[i]) or token .. ' -1 0 '
  end
end

local function drop_ended(e, h, now)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', e, '-inf', string.format('%.0f', now))) do
    redis.call('ZREM', e, owner)
    redis.call('HDEL', h, owner)
  end
end

-- Let the lease and the shares in e and h last as long as the last share.
local function settle(lease, e, h, now)
  local last = redis.call('ZREVRANGE', e, 0, 0, 'WITHSCORES')[2]
  if not last then
    redis.call('DEL', lease, e, h)
    return
  end
  local left = string.format('%.0f', tonumber(last) - now)
  redis.call('PEXPIRE', lease, left)
  redis.call('PEXPIRE', e, left)
  if h then redis.call('PEXPIRE', h, left) end
end

-- Whether a share fits beside those that are held, of which none has ended.
local function has_room(held, e, mode, permits)
  if not held then return true end
  if not is_shared(held) or string.match(held, '^%z%d+%z=(%a+)') ~= mode then return false end
  if mode == 'reader' then return true end
  local _, owner = read_shared(held)
  return (owner ~= '' and 1 or redis.call('ZCARD', e)) < tonumber(permits)
end

-- A reader is in no other reader's way: one that has only readers before it may be granted out of turn. The field '' of w has a
-- number of arrival up to which there are readers only. No later waiter gets such a number (see share_join.lua), so that
-- stays true. All of them were woken when it was noted, or when the last writer left.
local TOGETHER = 500 -- readers that one run wakes: it keeps the server busy for less than a millisecond
local BOUNDARY = 16 -- of these the last ones, each of which wakes those behind: some of them may be dead

-- Return the number of arrival of the owner, and the one up to which there are readers only.
local function number_in_line(q, w, owner)
  return tonumber(redis.call('ZSCORE', q, owner) or 'inf'), tonumber(redis.call('HGET', w, '') or 0)
end

-- Wake the readers behind a number of arrival, up to the first other waiter; return the number of the last one.
local function open_to_readers(q, w, after)
  local tickets, channels, up_to, size, woken, behind = {}, {}, after, 4, 0, true
  while behind and woken < TOGETHER do
    local from = string.format('(%.0f', up_to)
    local part = redis.call('ZRANGEBYSCORE', q, from, '+inf', 'WITHSCORES', 'LIMIT', 0, size)
    behind = #part == 2 * size
    for i = 1, #part, 2 do
      local sign = redis.call('HGET', w, part[i]) or ''
      local command, channel, ticket = string.match(sign, '^%d+ (S?PUBLISH)/reader/%d+ (%Z+) (%d+)')
      if not command then
        behind = false
        break
      end
      up_to, woken = tonumber(part[i + 1]), woken + 1
      if not tickets[channel] then
        tickets[channel] = {}
        channels[#channels + 1] = {channel, command}
      end
      table.insert(tickets[channel], ticket)
    end
    size = math.min(4 * size, TOGETHER - woken)
  end
  if up_to > after then redis.call('HSET', w, '', string.format('%.0f', up_to)) end
  for _, each in ipairs(channels) do
    if each[1] ~= '-' then redis.pcall(each[2], each[1], table.concat(tickets[each[1]], ' ')) end
  end
  return up_to
end

-- Wake the head of the line, if there is room for it; if it is a reader, also the readers behind it that were not woken
-- yet. *anew*: a writer has left, so all of them are woken.
local function wake_fitting_head(lease, q, w, e, h, now, anew)
  if not keep_line(q, w) then return end
  local head, fields = head_of_line(q, w, now)
  if not head then return end
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return end
  if is_shared(held) then drop_ended(e, h, now) end
  local mode, permits = string.match(fields[2], '/(%a+)/(%d+)$')
  if not has_room(held, e, mode, permits) then return end
  if mode ~= 'reader' or not anew then notify(fields) end
  if mode ~= 'reader' then return end
  local _, readers_to = number_in_line(q, w, head)
  open_to_readers(q, w, anew and 0 or readers_to)
end
