-- End every grant that has this token, note the reason for its holders, and let the next waiter have its turn.
-- The last token stays, so the next grant has a higher one.
--   KEYS  lease, last token, q, w, sq, sw, e, h, x
--   ARGV  token, reason, 'hybrid' or 'counter', ms that an idle counter is kept (0: for ever)
--   ->    1 a grant had this token, and has ended | 0 no grant has it
local lease, last, q, w, sq, sw, e, h, x = unpack(KEYS)
local wanted, reason = ARGV[1], ARGV[2]
local NOTED = 1000 -- ms for which a reason is kept longer than the grant would have lasted
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if not held then return 0 end
local now = milliseconds()
if is_shared(held) then
  held = spread(lease, held, e, h, now)
  settle(lease, e, h, now)
end

local function note(owner, left)
  redis.call('HSET', x, owner, reason)
  redis.call('PEXPIRE', x, math.max(redis.call('PTTL', x), NOTED + math.max(0, math.ceil(left))))
end

local token = string.match(held, '^%Z*%z(%d+)%z')
if not is_shared(held) then
  if token ~= wanted then return 0 end
  note(string.match(held, '^%Z*'), redis.call('PTTL', lease))
  redis.call('DEL', lease)
elseif string.match(held, '=(%a+)$') == 'reader' then
  if token ~= wanted then return 0 end
  local ends = redis.call('ZRANGE', e, 0, -1, 'WITHSCORES')
  for i = 1, #ends, 2 do note(ends[i], tonumber(ends[i + 1]) - now) end
  redis.call('DEL', lease, e, h)
else
  drop_ended(e, h, now)
  local owner
  local entries = redis.call('HGETALL', h)
  for i = 1, #entries, 2 do
    if string.match(entries[i + 1], '^%d+') == wanted then owner = entries[i] end
  end
  local ends = owner and redis.call('ZSCORE', e, owner)
  if not ends then return 0 end
  note(owner, tonumber(ends) - now)
  redis.call('ZREM', e, owner)
  redis.call('HDEL', h, owner)
  settle(lease, e, h, now)
end

-- The grant has ended, so a line that cannot be read makes no error of it.
if redis.call('EXISTS', lease) == 0 and redis.call('EXISTS', q) == 1 then
  hand_on(lease, last, q, w, ARGV[3], ARGV[4], redis.call('TIME'))
end
if redis.call('EXISTS', sq) == 1 then wake_fitting_head(lease, sq, sw, e, h, now, true) end
return 1
