-- The line of a lock on one node, whose head is woken, and asks.

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
