-- Permits and readers: functions for the scripts of shares, which also use those of the line.
--   lease  while the name is shared: NUL TOKEN NUL '=' MODE, as if an owner with an empty id held a lock. It expires with
--          the share that lasts longest, so the scripts of plain locks refuse by what they read anyway
--   e      sorted set: owner -> when its share ends, in ms since 1970
--   h      hash: owner -> "TOKEN PERMIT PERMITS METADATA"; a reader has the permit -1, and no entry without metadata
-- The shares are over if the lease is gone or has another owner: an operator may have deleted it.

local function is_shared(held)
  return held and string.sub(held, 1, 1) == '\0'
end

local function drop_ended(e, h, now)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', e, '-inf', string.format('%.0f', now))) do
    redis.call('ZREM', e, owner)
    redis.call('HDEL', h, owner)
  end
end

-- Let the lease and the shares last as long as the last share.
local function settle(lease, e, h, now)
  local last = redis.call('ZREVRANGE', e, 0, 0, 'WITHSCORES')[2]
  if not last then
    redis.call('DEL', lease, e, h)
    return
  end
  local left = string.format('%.0f', tonumber(last) - now)
  redis.call('PEXPIRE', lease, left)
  redis.call('PEXPIRE', e, left)
  redis.call('PEXPIRE', h, left)
end

-- Whether a share fits beside those that are held, of which none has ended.
local function has_room(held, e, mode, permits)
  if not held then return true end
  if not is_shared(held) or string.match(held, '=(%a+)$') ~= mode then return false end
  return mode == 'reader' or redis.call('ZCARD', e) < tonumber(permits)
end

-- Wake the head of the line, if there is room for it. If it is a reader, readers among the first sixteen waiters are
-- woken with it: their requests follow each other without a pause. After a grant that is the sixteenth alone, because
-- those before it were woken by earlier ones.
local function wake_fitting_head(lease, q, w, e, h, now, granted)
  if not keep_line(q, w) then return end
  local head, fields = head_of_line(q, w, now)
  if not head then return end
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return end
  if is_shared(held) then drop_ended(e, h, now) end
  local mode, permits = string.match(fields[2], '/(%a+)/(%d+)$')
  if not has_room(held, e, mode, permits) then return end
  notify(fields)
  if mode ~= 'reader' then return end
  for _, owner in ipairs(redis.call('ZRANGE', q, granted and 15 or 1, 15)) do
    local sign = redis.call('HGET', w, owner) or ''
    local behind = {string.match(sign, '^(%d+) (%S+/reader/%d+) (.+) (%d+)$')}
    if behind[1] then notify(behind) end
  end
end
