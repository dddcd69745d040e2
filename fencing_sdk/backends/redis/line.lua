-- The line of one lock. Put in front of every script that looks at it.
--   q  sorted set: owner -> number of arrival
--   w  hash: owner -> "MILLISECONDS COMMAND CHANNEL TICKET": last sign of life, and how to wake it
-- Both keys live as long as somebody gives signs of life. One who gave none for LINE_TTL has left.

local LINE_TTL = 3000
local LINE_KEPT = 4 * LINE_TTL

local function milliseconds()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Whether anybody may be in line; keeps the line. A write, so that client tracking does not follow it.
local function keep_line(q, w)
  if redis.call('PEXPIRE', q, LINE_KEPT) == 0 then return false end
  redis.call('PEXPIRE', w, LINE_KEPT)
  return true
end

-- Whether the owner is in line; it lives.
local function give_sign(w, owner, now)
  local sign = redis.call('HGET', w, owner)
  if not sign then return false end
  redis.call('HSET', w, owner, (string.gsub(sign, '^[0-9]+', string.format('%.0f', now), 1)))
  return true
end

local function leave_line(q, w, owner)
  redis.call('ZREM', q, owner)
  redis.call('HDEL', w, owner)
end

-- The owner whose turn it is, the words that wake it, and the milliseconds until it is given up.
local function head_of_line(q, w, now)
  while true do
    local head = redis.call('ZRANGE', q, 0, 0)[1]
    if not head then return nil end
    local sign = redis.call('HGET', w, head)
    local words = {string.match(sign or '', '^(%d+) (%S+) (.+) (%d+)$')}
    local left = (tonumber(words[1]) or 0) + LINE_TTL - now
    -- A sign from a future further away was given by a clock that was set back, or by another master's.
    if left > 0 and left <= 2 * LINE_TTL then return head, words, left end
    leave_line(q, w, head)
  end
end

local function wake_head(q, w)
  if not keep_line(q, w) then return end
  local head, words = head_of_line(q, w, milliseconds())
  if not head or words[3] == '-' then return end
  redis.pcall(words[2] == 'SPUBLISH' and 'SPUBLISH' or 'PUBLISH', words[3], words[4]) -- not permitted: it polls
end
