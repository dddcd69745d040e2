-- The line of one lock: what the scripts do where there are waiters.
--   q  sorted set: owner -> number of arrival
--   w  hash: owner -> "MILLISECONDS MODE SIGN TTL TICKET COMMAND CHANNEL NUL METADATA": when its last sign of life
--      came by this server's clock, and what the waiter said in it
--   MODE  'direct': hand it the lock; 'silent': only in the answer to its sign, as it hears no message;
--         'wake': tell it to ask for the lock

local SUSPECT = 1250 -- such a waiter has missed a sign: if it is frozen, a grant would be lost for a ttl
local LOOKS = 500 -- waiters that cannot be reached, and are passed over in one run

local function publish(command, channel, message) -- if this is not permitted, the next sign of life finds the grant
  local heard = redis.pcall(command == 'SPUBLISH' and 'SPUBLISH' or 'PUBLISH', channel, message)
  return type(heard) == 'number' and heard > 0
end

-- Hand a free lock to the first waiter that can be reached, or wake the one whose turn it is. Those that cannot be
-- reached stay in the line. *asking* has the owners whose signs of life are being answered: they need no message.
-- Return the owner that has the lock now; or nil, the milliseconds for which it is kept for a waiter, and that waiter;
-- or nil and an error.
local function hand_on(lease, last, q, w, kind, retention, time, asking)
  local now, passed, digits, left, turn = milliseconds(time), {}, nil, nil, nil
  local handed, failed
  while not handed and not turn and not failed and #passed < 2 * LOOKS do
    local head = redis.pcall('ZPOPMIN', q)
    local owner = head[1]
    failed = head.err and head or nil
    if not owner then break end
    local kept = redis.pcall('HGET', w, owner)
    if type(kept) == 'table' then failed, kept = kept, nil end
    local at, mode, sign, ttl, ticket, command, channel, metadata = string.match(
      kept or '', '^(%d+) (%l+) (%d+) (%d+) (%d+) (%u+) (%Z*)%z(.*)$')
    local age = at and now - tonumber(at) or LINE_TTL
    -- A sign of life further in the future than that is from a clock that was set back, or another master's clock.
    if failed then
      passed[#passed + 1], passed[#passed + 2] = head[2], owner
    elseif age >= LINE_TTL or age < -LINE_TTL then
      redis.call('HDEL', w, owner)
    else
      local reached = asking and asking[owner] and mode ~= 'wake'
      if reached or (mode == 'direct' and age <= SUSPECT) then
        if digits then
          redis.call('SET', lease, owner .. '\0' .. digits .. '\0' .. metadata, 'PX', ttl)
        else
          digits = grant(lease, last, owner, ttl, metadata, kind, retention, true, time)
          if type(digits) == 'table' then failed = digits end
        end
        -- Granted first, and told then. The message names the sign of life from which the grant counts.
        reached = not failed and (reached or publish(command, channel, ticket .. ' ' .. sign .. ' ' .. digits))
      elseif mode ~= 'silent' then
        if not (asking and asking[owner]) then publish(command, channel, ticket) end
        turn = owner
      end
      if reached then
        redis.call('HDEL', w, owner)
        handed = owner
      else
        passed[#passed + 1] = head[2]
        passed[#passed + 1] = owner
        left = left or LINE_TTL - age
      end
    end
  end
  if #passed > 0 then
    redis.call('ZADD', q, unpack(passed))
    redis.call('PEXPIRE', q, LINE_KEPT)
  end
  if handed then return handed end
  redis.call('DEL', lease)
  return nil, failed or left, turn
end
