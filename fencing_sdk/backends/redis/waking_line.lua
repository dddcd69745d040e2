-- A line whose head is woken, and asks: that of shares, and that of a node of a quorum.
--   q  sorted set: owner -> number of arrival
--   w  hash: owner -> "MILLISECONDS COMMAND CHANNEL TICKET NUL METADATA": its last sign of life, and the message that
--      wakes it. The line of a quorum has no metadata.
--      The command of a waiter for a share is followed by its mode and the number of permits: "PUBLISH/permit/4".
--      '' -> a number of arrival, with which share.lua notes something else

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

-- Return the owner whose turn it is, the fields of its entry in w, and the milliseconds until it counts as gone.
local function head_of_line(q, w, now)
  while true do
    local head = redis.call('ZRANGE', q, 0, 0)[1]
    if not head then return nil end
    local sign = redis.call('HGET', w, head)
    local fields = {string.match(sign or '', '^(%d+) (%S+) (%Z+) (%d+)')}
    local left = (tonumber(fields[1]) or 0) + LINE_TTL - now
    -- A sign of life further in the future than that is from a clock that was set back, or another master's clock.
    if left > 0 and left <= 2 * LINE_TTL then return head, fields, left end
    leave_line(q, w, head)
  end
end

local function notify(fields)
  if fields[3] == '-' then return end
  redis.pcall(string.match(fields[2], '^S?PUBLISH') or 'PUBLISH', fields[3], fields[4]) -- if this is not permitted, the waiter polls
end

local function wake_head(q, w)
  if not keep_line(q, w) then return end
  local head, fields = head_of_line(q, w, milliseconds())
  if head then notify(fields) end
end
