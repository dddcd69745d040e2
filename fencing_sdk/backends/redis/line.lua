-- The line of a name. Locks, writers, readers and permits wait in one line, in the order of their arrival.

-- [time]
--   q  sorted set: owner -> number of arrival
--   w  hash: owner -> "MILLISECONDS WAY MODE PERMITS SIGN TTL TICKET COMMAND CHANNEL NUL LABEL": when its last sign of
--      life came by this server's clock, and what the waiter said in it
--      '' -> a number of arrival up to which only readers wait: see [serve]
--   WAY  'direct': hand it the lock; 'silent': only in the answer to its sign, as it hears no message; 'wake': wake it,
--        and it asks
-- A waiter without a sign of life for LINE_TTL has left. The keys expire when no waiter gives signs of life.
local LINE_TTL = 3000
local LINE_KEPT = 4 * LINE_TTL

local function milliseconds(time)
  time = time or redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A sign of life from further in the future is from a clock that was set back, or from another master's clock.
local function is_alive(age)
  return age > -LINE_TTL and age < LINE_TTL
end

-- [leave]
local function leave_line(owner)
  redis.call('ZREM', q, owner)
  if redis.call('EXISTS', q) == 1 then redis.call('HDEL', w, owner) else redis.call('DEL', w) end
end

-- [serve]
local SUSPECT = 1250 -- such a waiter has missed a sign: if it is frozen, a grant would be lost for a ttl
local LOOKS = 500 -- waiters that cannot be reached, and are passed over in one run
local TOGETHER = 500 -- readers that one run wakes: it keeps the server busy for less than a millisecond
local NOT_ASKING = {}

local function publish(command, channel, message) -- if this is not permitted, the next sign of life finds the grant
  local heard = redis.pcall(command == 'SPUBLISH' and 'SPUBLISH' or 'PUBLISH', channel, message)
  return type(heard) == 'number' and heard > 0
end

-- Return at, way, mode, permits, sign, ttl, ticket, command, channel and label of a waiter; or nil, and maybe an error.
local function read_waiter(owner)
  local kept = redis.pcall('HGET', w, owner)
  if type(kept) == 'table' then return nil, kept end
  return string.match(kept or '', '^(%d+) (%l+) (%l+) (%d+) (%d+) (%d+) (%d+) (%u+) (%Z*)%z(.*)$')
end

-- A reader is in no other reader's way: one that has only readers before it may be granted out of turn. The field '' of w
-- has a number of arrival up to which there are readers only. No later waiter gets such a number (see [stand]), so that
-- stays true. All of them were woken when it was noted, or when the name became free.

-- Return the number of arrival of the owner, and the one up to which there are readers only.
local function number_in_line(owner)
  return tonumber(redis.call('ZSCORE', q, owner) or 'inf'), tonumber(redis.call('HGET', w, '') or 0)
end

-- Wake the readers behind a number of arrival, up to the first other waiter, and note how far they reach.
local function open_to_readers(after, asking)
  local tickets, channels, up_to, size, woken, behind = {}, {}, after, 4, 0, true
  while behind and woken < TOGETHER do
    local from = string.format('(%.0f', up_to)
    local part = redis.call('ZRANGEBYSCORE', q, from, '+inf', 'WITHSCORES', 'LIMIT', 0, size)
    behind = #part == 2 * size
    for i = 1, #part, 2 do
      local _, _, mode, _, _, _, ticket, command, channel = read_waiter(part[i])
      if mode ~= 'reader' then
        behind = false
        break
      end
      up_to, woken = tonumber(part[i + 1]), woken + 1
      if not (asking or NOT_ASKING)[part[i]] then
        if not tickets[channel] then
          tickets[channel] = {}
          channels[#channels + 1] = {command, channel}
        end
        table.insert(tickets[channel], ticket)
      end
    end
    size = math.min(4 * size, TOGETHER - woken)
  end
  if up_to > after then redis.call('HSET', w, '', string.format('%.0f', up_to)) end
  for _, each in ipairs(channels) do publish(each[1], each[2], table.concat(tickets[each[2]], ',')) end
end

-- Serve the line of a name that is free, or shared, if its head fits beside those who hold: hand it a free lock, or wake
-- it; with a reader also the readers behind it. Waiters that cannot be reached stay in the line, and are passed over.
-- *asking* has the owners that are being answered: they need no message.
-- Return the owner that has the lock now; or nil, the milliseconds for which the name is kept for a waiter, and that
-- waiter if it was woken; or nil and an error. Then a name that was free stays free.
local function serve(held, time, asking)
  local now, place, handed, left, turn, failed, digits = milliseconds(time), 0, nil, nil, nil, nil, nil
  asking = asking or NOT_ASKING
  while place < LOOKS and not (handed or turn or failed) do
    local head = redis.pcall('ZRANGE', q, place, place, 'WITHSCORES')
    failed = head.err and head or nil
    local owner = head[1]
    if not owner then break end
    local at, way, mode, permits, sign, ttl, ticket, command, channel, label = read_waiter(owner)
    local age = at and now - tonumber(at) or LINE_TTL
    if not at and way then
      failed = way
    elseif not is_alive(age) then
      leave_line(owner)
    elseif not has_room(held, mode, permits) then
      left = left or LINE_TTL - age
      break
    else
      local reached = asking[owner] and way ~= 'wake'
      if reached or (way == 'direct' and age <= SUSPECT) then
        if digits then
          redis.call('SET', lease, owner .. '\0' .. digits .. '\0' .. label, 'PX', ttl)
        else
          digits = grant(lease, last, kind, owner, ttl, label, true, time)
          if type(digits) == 'table' then failed = digits end
        end
        -- Granted first, then announced. The message names the sign of life from which the grant counts.
        reached = not failed and (reached or publish(command, channel, ticket .. ' ' .. sign .. ' ' .. digits))
      elseif way ~= 'silent' then
        turn = owner
        if not asking[owner] then publish(command, channel, ticket) end
        if mode == 'reader' and place == 0 then
          local number, noted = tonumber(head[2]), held and tonumber(redis.call('HGET', w, '') or 0) or 0
          open_to_readers(math.max(number, noted), asking)
        end
      end
      if reached then
        leave_line(owner)
        handed = owner
      end
      left, place = left or LINE_TTL - age, place + 1
    end
  end
  if handed then return handed end
  if not held then redis.call('DEL', lease) end
  return nil, failed or left, turn
end

-- [stand]
-- Signs of life of waiters, which also join the lines of their names. Then the lines are served.
--   KEYS  lease, last, q, w of each name, and e, h; on a cluster these two only of one with waiters for shares among them
--   ARGV  kind; then for each name: number of its keys, number of waiters; then for each of them: owner, and what w keeps
--         of it, without the milliseconds
--   ->    for each name: an error | {ms left of the lease (negative: none), token of the waiter that has the lock now (''
--         if none), then the number of that waiter, or of those that may ask}
local time, answers, key, argument = redis.call('TIME'), {}, 1, 2
local now = milliseconds(time)

-- Note the signs of life of owners, and let those that are new join. Return nil, or an error.
local function note_signs(owners, signs)
  if redis.call('EXISTS', q) == 0 then redis.call('DEL', w) end -- the server has evicted q: every waiter joins anew
  local new = redis.pcall('HSET', w, unpack(signs))
  if type(new) == 'table' then return new end
  if new > 0 then
    local behind, arrivals = tonumber(redis.pcall('ZRANGE', q, -1, -1, 'WITHSCORES')[2]) or 0, {}
    behind = math.max(behind, tonumber(redis.call('HGET', w, '') or 0))
    for number, owner in ipairs(owners) do
      arrivals[2 * number - 1] = string.format('%.0f', behind + number)
      arrivals[2 * number] = owner
    end
    local joined = redis.pcall('ZADD', q, 'NX', unpack(arrivals))
    if type(joined) == 'table' then
      redis.call('HDEL', w, unpack(owners))
      return joined
    end
  end
  redis.call('PEXPIRE', q, LINE_KEPT)
  redis.call('PEXPIRE', w, LINE_KEPT)
end

local function stand(first, count)
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return held end
  local shared = e and is_shared(held)
  if shared then drop_ended(now) end
  local holder, token, may_ask, numbers = held and string.match(held, '^%Z*'), '', {}, {}
  local owners, signs, readers = {}, {}, {}
  for number = 1, count do
    local owner, said = ARGV[first + 2 * number - 2], ARGV[first + 2 * number - 1]
    if owner == holder then -- the message that handed it the lock was lost, or is on its way
      redis.call('PEXPIRE', lease, string.match(said, '^%l+ %l+ %d+ %d+ (%d+)'))
      token, may_ask[1] = string.match(held, '^[0-9]+', #holder + 2), number
    elseif shared and has_share(held, owner, now) then
      may_ask[#may_ask + 1] = number
    else
      owners[#owners + 1] = owner
      signs[#signs + 1] = owner
      signs[#signs + 1] = string.format('%.0f ', now) .. said
      numbers[owner] = number
      if string.match(said, '^%l+ (%l+)') == 'reader' then readers[#readers + 1] = owner end
    end
  end
  local failed = #owners > 0 and note_signs(owners, signs)
  if failed then return failed end
  if shared or not held then
    local handed, left, turn = serve(held, time, numbers)
    if type(left) == 'table' then return left end
    if handed and numbers[handed] then
      token, may_ask = string.match(redis.call('GETEX', lease), '^[0-9]+', #handed + 2), {numbers[handed]}
    elseif not handed then
      may_ask[#may_ask + 1] = numbers[turn]
      for _, owner in ipairs(has_room(held, 'reader') and readers or {}) do
        local number, readers_to = number_in_line(owner)
        if number <= readers_to and owner ~= turn then may_ask[#may_ask + 1] = numbers[owner] end
      end
    end
  end
  return {redis.call('PTTL', lease), token, unpack(may_ask)}
end

while key <= #KEYS do
  local keys, count = tonumber(ARGV[argument]), tonumber(ARGV[argument + 1])
  lease, last, q, w, e, h = unpack(KEYS, key, key + math.min(keys, 6) - 1)
  answers[#answers + 1] = stand(argument + 2, count)
  key, argument = key + keys, argument + 2 + 2 * count
end
return answers
