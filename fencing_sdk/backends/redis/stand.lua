-- Signs of life of waiters, which also join the lines of their locks. A free lock is handed on.
--   KEYS  lease, last token, q, w of each lock
--   ARGV  'hybrid' or 'counter', ms that an idle counter is kept (0: for ever); then for each lock: number of waiters;
--         then for each of them: owner, and what w keeps of it, without the milliseconds
--   ->    for each lock: an error | {ms left of the lease (negative: none), number of a waiter (0: none), its token
--         ('': it is its turn to ask)}
local time, answers, argument = redis.call('TIME'), {}, 3
local now = string.format('%.0f ', milliseconds(time))

local function stand(lease, last, q, w, first, count)
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return held end
  local holder, numbers, signs, owners, repeated = held and string.match(held, '^%Z*'), {}, {}, {}, nil
  for number = 1, count do
    local owner, said = ARGV[first + 2 * number - 2], ARGV[first + 2 * number - 1]
    if owner == holder then -- the message that handed it the lock was lost, or is on its way
      redis.call('PEXPIRE', lease, string.match(said, '^%l+ %d+ (%d+)'))
      repeated = number
    else
      signs[#signs + 1] = owner
      signs[#signs + 1] = now .. said
      owners[#owners + 1] = owner
      numbers[owner] = number
    end
  end
  if #owners > 0 then
    local new = redis.pcall('HSET', w, unpack(signs))
    if type(new) == 'table' then return new end
    if new > 0 then
      local behind, arrivals = tonumber(redis.pcall('ZRANGE', q, -1, -1, 'WITHSCORES')[2]) or 0, {}
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
  if held then
    local token = repeated and string.match(held, '^[0-9]+', #holder + 2) or ''
    return {redis.call('PTTL', lease), repeated or 0, token}
  end
  local handed, left, turn = hand_on(lease, last, q, w, ARGV[1], ARGV[2], time, numbers)
  if type(left) == 'table' then return left end
  if handed and numbers[handed] then
    local token = string.match(redis.call('GETEX', lease), '^[0-9]+', #handed + 2)
    return {redis.call('PTTL', lease), numbers[handed], token}
  end
  return {redis.call('PTTL', lease), numbers[turn] or 0, ''}
end

for number = 1, #KEYS, 4 do
  local count = tonumber(ARGV[argument])
  answers[#answers + 1] = stand(KEYS[number], KEYS[number + 1], KEYS[number + 2], KEYS[number + 3], argument + 1, count)
  argument = argument + 1 + 2 * count
end
return answers
