-- The line of one name by the rules of fencing_sdk/abc/line.py; each script is one verb.
--   KEYS  1  a string: when the one who holds alone dies, the longest ttl asked and the number of its ticket, 8 bytes
--            each; its owner; NUL; then the line in one of the forms of `line_in`
--         2  a hash, of use if anyone waits or several hold together: n<number> -> owner who waits, o<owner> -> number,
--            longest ttl, row; a -> first number of those who wait; t -> the time of the latest sign of life in 3
--         3  a sorted set: who holds together, by when it dies
--         4  on a cluster, never written: while a slot moves, a server refuses a script that names it as a whole, instead
--            of failing in the middle of it. Then a script may run with the first key alone
--   ARGV  1  'hybrid' or 'counter', then what the verb needs
--   ->    {token, permit, number} holds | {-1, ms or -1, number} waits | {-2, taken, reason} gone | {-3, ms} busy
-- Any of the keys may be lost: who is not found is gone, and draws again. GETEX reads, but counts as a write: a replica
-- refuses it, and a server without memory lets a script go on that has begun to write.

-- [now]
local saved = redis.pcall('GETEX', KEYS[1])
if type(saved) == 'table' then return saved end
local S, hybrid, time = KEYS[1], ARGV[1] == 'hybrid', redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local NO_OWNER = '000000000000000000000000\0'
local function store(text, ms)
  if hybrid then
    redis.call('SET', S, text, 'PX', math.max(604800000, ms)) -- a week
  else
    redis.call('SET', S, text)
  end
end

-- [draw alone]
-- Where no ticket is in the line, nothing is unpacked, and no function is defined.
--   ARGV  2 owner, 3 ms, 4 mode, 5 width, 6 label, 7 '1' if only if it holds, 8 bell: see ring
local owner, ttl, kind, last, drawn = ARGV[2], tonumber(ARGV[3]), ARGV[4], nil, nil
local ticks = hybrid and time[1] * 100000 + math.floor(time[2] / 10) or 0
if not saved then -- numbers go on beyond those of lines that were lost
  last, drawn = 0, now
elseif string.sub(saved, 25, 26) == '\0I' then
  last, drawn = struct.unpack('>I8I8', saved, 27)
end
if last and last < 2^53 - 2^20 and ticks < 2^53 - 2^20 and (kind == 'lock' or kind == 'writer') then
  last, drawn = math.max(last + 1, ticks), drawn + 1
  store(struct.pack('>I8I8I8', now + ttl, ttl, drawn) .. owner .. '\0A' .. struct.pack('>I8I8I8', last, drawn, now)
        .. string.sub(kind, 1, 1) .. ARGV[8] .. '\0' .. ARGV[6], ttl)
  return {last, -1, drawn}
end

-- [give back alone]
--   ARGV  2 owner, 3 ms for which it goes on standing there, 4 the digest of its owner then
local owner, ttl = ARGV[2], tonumber(ARGV[3])
local start = 25 + #owner
if ttl == 0 and saved and string.sub(saved, 25, start + 1) == owner .. '\0A'
   and string.sub(saved, 1, 8) > struct.pack('>I8', now) then
  store(NO_OWNER .. 'I' .. string.sub(saved, start + 2, start + 17), 0)
  return {1}
end

-- [form]
local LAST, WAITS, DRAWN, ENDED, ALONE, TOGETHER, SHARED_TOKEN, SLOTS, LONGEST_HELD = 1, 2, 3, 4, 5, 6, 7, 8, 9
local OWNER, DIES, LONGEST, SINCE, TOKEN, PERMIT, KIND, WIDTH, LABEL, BELL, NUMBER = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11

-- The line: last token, 1 if anyone waits, how many were drawn, {owner, until, reason} of those who were ended, the row of
-- the one who holds alone, mode of those who hold together, their token, taken permits, longest ttl.
--   I  it is empty: last token, drawn
--   A  one holds alone, by the last token: last token, drawn, since, letter of its mode, bell, NUL, label
--   L  anything: packed
local function line_in(saved)
  local start = string.find(saved, '\0', 25, true)
  local form = start and string.sub(saved, start + 1, start + 1)
  if form == 'I' then
    local last, drawn = struct.unpack('>I8I8', saved, start + 2)
    return {last, 0, drawn, {}, false, false, 0, '', 0}
  elseif form == 'A' then
    local dies, longest, number = struct.unpack('>I8I8I8', saved)
    local last, drawn, since = struct.unpack('>I8I8I8', saved, start + 2)
    local stop = string.find(saved, '\0', start + 27, true)
    local kind = string.sub(saved, start + 26, start + 26) == 'w' and 'writer' or 'lock'
    local row = {string.sub(saved, 25, start - 1), dies, longest, since, last, -1, kind, 1, string.sub(saved, stop + 1),
                 string.sub(saved, start + 27, stop - 1), number}
    return {last, 0, drawn, {}, row, false, 0, '', 0}
  elseif form == 'L' then
    local line = cmsgpack.unpack(string.sub(saved, start + 2))
    if line[ALONE] then line[ALONE][DIES], line[ALONE][LONGEST] = struct.unpack('>I8I8', saved) end
    return line
  end
end

-- [name]
local BESIDE, WAITER_TTL, REASON_TTL, FORGOTTEN, MOST = 3600000, 5000, 60000, 86400000, 500
local Q, E = KEYS[2], KEYS[3]
local line = {0, 0, now, {}, false, false, 0, '', 0}
if saved then line = line_in(saved) end
if not line then return redis.error_reply('WRONGTYPE this is not a line') end
local function save()
  local row, text = line[ALONE], NO_OWNER
  local single = line[WAITS] == 0 and not line[TOGETHER] and #line[ENDED] == 0
  if row then text = struct.pack('>I8I8I8', row[DIES], row[LONGEST], row[NUMBER]) .. row[OWNER] .. '\0' end
  if not single or row and row[TOKEN] ~= line[LAST] then
    text = text .. 'L' .. cmsgpack.pack(line)
  elseif row then
    text = text .. 'A' .. struct.pack('>I8I8I8', line[LAST], line[DRAWN], row[SINCE]) .. string.sub(row[KIND], 1, 1)
           .. row[BELL] .. '\0' .. row[LABEL]
  else
    text = text .. 'I' .. struct.pack('>I8I8', line[LAST], line[DRAWN])
  end
  if text ~= saved and (saved or row or not single) then -- one that was lost stays lost: all hear of it
    store(text, row and row[DIES] - now or line[LONGEST_HELD])
  end
end

-- [give back while the slot moves]
local alone = line[ALONE]
if not Q and ttl == 0 and alone and alone[OWNER] == owner and alone[DIES] > now then
  line[ALONE] = false -- who waits looks later
  save()
  return {1}
end

-- [keep while the slot moves]
if not Q then
  local row, ttl, number = line[ALONE], tonumber(ARGV[4]), tonumber(ARGV[5])
  if row and row[OWNER] == ARGV[3] and row[DIES] > now and (number == 0 or number == row[NUMBER]) then
    row[LONGEST] = math.max(row[LONGEST], ttl)
    row[DIES] = math.min(math.max(row[DIES], now + ttl), now + row[LONGEST])
    save()
    return {{row[TOKEN], -1, row[NUMBER]}}
  end
end

-- [line]
if not Q then return redis.error_reply('TRYAGAIN the slot is moving') end
local asked = {} -- owners that get an answer, and no bell
local count, first, signed = 0, nil, false

local function lives(row)
  row[DIES] = math.min(row[DIES], now + row[LONGEST]) -- else the clock was set back
  return row[DIES] > now
end

local function draw_token()
  local ticks = hybrid and time[1] * 100000 + math.floor(time[2] / 10) or 0
  line[LAST] = math.max(line[LAST] + 1, ticks)
  return line[LAST]
end

-- A bell is a letter, a channel, and 32 digits of the digest of the owner. S: by SPUBLISH. Small: the client has to ask.
local function ring(row, news)
  local how, channel, key = string.sub(row[BELL], 1, 1), string.sub(row[BELL], 2, -33), string.sub(row[BELL], -32)
  if channel == '' or asked[row[OWNER]] then return end
  local command = string.upper(how) == 'S' and 'SPUBLISH' or 'PUBLISH'
  redis.pcall(command, channel, how == string.upper(how) and key .. ' ' .. news or key)
end

local function read(of)
  local packed = redis.call('HGET', Q, 'o' .. of)
  return packed and cmsgpack.unpack(string.sub(packed, 17))
end

local function put(row)
  redis.call('HSET', Q, 'o' .. row[OWNER], struct.pack('>I8I8', row[NUMBER], row[LONGEST]) .. cmsgpack.pack(row))
  redis.call('PEXPIRE', Q, math.max(row[LONGEST], line[LONGEST_HELD]) + BESIDE)
end

-- Note until when one lives that holds together with others.
local function sign(row)
  redis.call('ZADD', E, row[DIES], row[OWNER])
  if row[LONGEST] > line[LONGEST_HELD] then line[LONGEST_HELD] = row[LONGEST] end
  signed = true
end

local function save_all()
  if signed and line[TOGETHER] then
    redis.call('HSET', Q, 't', now)
    redis.call('PEXPIRE', Q, line[LONGEST_HELD] + BESIDE)
    redis.call('PEXPIRE', E, line[LONGEST_HELD] + BESIDE)
  end
  save()
end

local function slot(at, char)
  line[SLOTS] = string.sub(line[SLOTS], 1, at) .. char .. string.sub(line[SLOTS], at + 2)
end

local function drop(row)
  if line[ALONE] then line[ALONE] = false return end
  if row[PERMIT] >= 0 then slot(row[PERMIT], '0') end
  redis.call('ZREM', E, row[OWNER])
  redis.call('HDEL', Q, 'o' .. row[OWNER])
end

local function hold(row)
  local together = row[KIND] == 'reader' or row[KIND] == 'permit'
  row[TOKEN] = row[KIND] == 'reader' and line[TOGETHER] and line[SHARED_TOKEN] or draw_token()
  row[SINCE], count = now, count + 1
  if row[KIND] == 'permit' then
    row[PERMIT] = (string.find(line[SLOTS], '0', 1, true) or #line[SLOTS] + 1) - 1
    slot(row[PERMIT], '1')
  end
  if together then
    line[TOGETHER], line[SHARED_TOKEN] = row[KIND], row[TOKEN]
    sign(row)
    put(row)
  else
    line[ALONE] = row
  end
  ring(row, string.format('%.0f %d %.0f', row[TOKEN], row[PERMIT], row[NUMBER]))
end

local function fits(row)
  return count == 0 or row[KIND] == line[TOGETHER] and count < row[WIDTH]
end

local function waiting(of)
  local row = line[WAITS] == 1 and read(of)
  if not row or row[TOKEN] then return end
  local before = row[DIES]
  if not lives(row) then redis.call('HDEL', Q, 'o' .. of, string.format('n%.0f', row[NUMBER])) return end
  if row[DIES] < before then put(row) end -- or it would live on at each look
  return row
end

local function holder(of)
  local row = line[ALONE]
  if row then return row[OWNER] == of and lives(row) and row or nil end
  local dies = line[TOGETHER] and tonumber(redis.call('ZSCORE', E, of) or 0) or 0
  row = dies > now and read(of)
  if not row then return end
  row[DIES] = dies
  lives(row)
  if row[DIES] < dies then redis.call('ZADD', E, row[DIES], of) end -- or it would live on at each look
  return row
end

-- Pass over the dead, then let those hold who do.
local function settle()
  count = 0
  if line[ALONE] then
    if not lives(line[ALONE]) then line[ALONE] = false end
    count = line[ALONE] and 1 or 0
  elseif line[TOGETHER] then
    if now < tonumber(redis.call('HGET', Q, 't') or 0) then -- the clock was set back
      for _, of in ipairs(redis.call('ZRANGE', E, 0, -1)) do holder(of) end
      signed = true
    end
    for _, of in ipairs(redis.call('ZRANGEBYSCORE', E, '-inf', now)) do drop(read(of) or {of, [PERMIT] = -1}) end
    count = redis.call('ZCARD', E)
    if count == 0 then
      line[TOGETHER], line[SLOTS], line[LONGEST_HELD] = false, '', 0
      redis.call('HDEL', Q, 't')
    end
  end
  if line[WAITS] == 0 then return end
  first = tonumber(redis.call('HGET', Q, 'a') or line[DRAWN] + 1)
  local from, most = first, first + MOST -- the rest are let in by those who keep their tickets then
  while first <= line[DRAWN] and first < most do
    local field = string.format('n%.0f', first)
    local next_owner = redis.call('HGET', Q, field)
    local row = next_owner and waiting(next_owner)
    if row and not fits(row) then break end
    redis.call('HDEL', Q, field)
    if row then
      hold(row)
      if line[ALONE] then redis.call('HDEL', Q, 'o' .. next_owner) end
    end
    first = first + 1
  end
  if first > line[DRAWN] then
    line[WAITS] = 0
    redis.call('HDEL', Q, 'a')
  elseif first > from then
    redis.call('HSET', Q, 'a', first)
  end
end

local function death(at)
  return (line[ALONE] and line[ALONE][DIES] or tonumber(redis.call('ZRANGE', E, at, at, 'WITHSCORES')[2] or now)) - now
end

local function place(row)
  if row[TOKEN] then return {row[TOKEN], row[PERMIT], row[NUMBER]} end
  if row[NUMBER] ~= first then return {-1, -1, row[NUMBER]} end
  return {-1, death(row[KIND] == line[TOGETHER] and 0 or -1), row[NUMBER]} -- one of its kind needs one to be free
end

local function gone(of)
  local reason
  for _, one in ipairs(line[ENDED]) do
    if one[1] == of and one[2] > now then reason = one[3] end
  end
  return {-2, line[ALONE] and 1 or 0, reason}
end

-- Forget why one was ended, and what was of use until some moment.
local function forget(of, before)
  local ended = {}
  for _, one in ipairs(line[ENDED]) do
    if one[1] ~= of and one[2] > before then ended[#ended + 1] = one end
  end
  line[ENDED] = ended
end

local function keep(of, ttl, number)
  local row = holder(of) or waiting(of)
  if not row or number ~= 0 and number ~= row[NUMBER] then return gone(of) end
  if not row[TOKEN] then ttl = math.min(ttl, WAITER_TTL) end
  local longer = ttl > row[LONGEST]
  row[DIES], row[LONGEST] = math.max(row[DIES], now + ttl), math.max(row[LONGEST], ttl)
  if not row[TOKEN] then
    put(row)
  elseif not line[ALONE] then
    sign(row)
    if longer then put(row) end
  end
  return place(row)
end

-- Give the place of one that holds to another owner, or to the same under a name that no keep reaches.
local function rename(row, of, ttl, bell)
  if not line[ALONE] then
    redis.call('ZREM', E, row[OWNER])
    redis.call('HDEL', Q, 'o' .. row[OWNER])
  end
  row[OWNER], row[DIES], row[LONGEST], row[BELL] = of, now + ttl, ttl, bell
  if not line[ALONE] then
    sign(row)
    put(row)
  end
end

-- [draw]
if math.max(line[LAST], ticks) >= 2^53 - 2^20 then
  return redis.error_reply('TOKENRANGE the next token would not fit into 53 bits')
end
asked[owner] = true
local known = holder(owner) or waiting(owner)
settle()
if known then
  local answer = keep(owner, ttl, 0)
  save_all()
  return answer
end
forget(owner, now - FORGOTTEN)
local unused = line[WAITS] == 0 and not line[TOGETHER] -- what is there is of a line that was lost
local row = {owner, now + ttl, ttl, now, false, -1, kind, tonumber(ARGV[5]), ARGV[6], ARGV[8], line[DRAWN] + 1}
if line[WAITS] == 0 and fits(row) then
  line[DRAWN] = row[NUMBER]
  if unused and kind ~= 'lock' and kind ~= 'writer' then redis.call('DEL', Q, E) end
  hold(row)
elseif ARGV[7] == '1' then
  save_all()
  return {-3, death(0)}
else
  line[DRAWN] = row[NUMBER]
  if unused then redis.call('DEL', Q, E) end
  row[LONGEST] = math.min(ttl, WAITER_TTL)
  row[DIES] = now + row[LONGEST]
  if line[WAITS] == 0 then
    line[WAITS], first = 1, row[NUMBER]
    redis.call('HSET', Q, 'a', first)
  end
  redis.call('HSET', Q, string.format('n%.0f', row[NUMBER]), owner)
  put(row)
end
save_all()
return place(row)

-- [keep]
--   ARGV  2 'full', or 'short' for {-4} from who holds as before; then owner, ms and number (0: any) of each ticket
--   ->    an answer for each
local short, answers, signs = ARGV[2] == 'short', {}, {}
for at = 3, #ARGV, 3 do asked[ARGV[at]] = true end
settle()
for at = 3, #ARGV, 3 do
  local of, ttl, number = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local dies = short and line[TOGETHER] and tonumber(redis.call('ZSCORE', E, of) or 0) or 0
  local packed = dies > now and redis.call('HGET', Q, 'o' .. of)
  local its_number, longest = 0, 0
  if packed then its_number, longest = struct.unpack('>I8I8', packed) end
  if number > 0 and its_number == number and longest >= ttl then
    signs[#signs + 1], signs[#signs + 2] = math.max(dies, now + ttl), of
    answers[#answers + 1] = {-4}
  else
    answers[#answers + 1] = keep(of, ttl, number)
  end
end
if #signs > 0 then
  redis.call('ZADD', E, unpack(signs))
  signed = true
  if hybrid and redis.call('PTTL', S) < 302400000 then redis.call('PEXPIRE', S, 604800000) end -- half a week, a week
end
save_all()
return answers

-- [give back]
asked[owner] = true
if ttl > 0 then settle() end -- one who died under the name that it will have goes with its slot
local row = holder(owner)
local waits = not row and waiting(owner)
if not row and not waits then
  local parked = holder('-' .. owner)
  if not parked then settle() end
  save_all()
  return parked and {1} or gone(owner)
end
if row and ttl > 0 and not holder('-' .. owner) then
  rename(row, '-' .. owner, ttl, string.sub(row[BELL], 1, -33) .. ARGV[4])
elseif row then
  drop(row)
else
  redis.call('HDEL', Q, 'o' .. owner, string.format('n%.0f', waits[NUMBER]))
end
settle()
save_all()
return {1}

-- [end]
--   ARGV  2 token, 3 reason
--   ->    the number of those that were ended
settle()
local token, over = tonumber(ARGV[2]), {}
for _, of in ipairs(line[ALONE] and {line[ALONE][OWNER]} or line[TOGETHER] and redis.call('ZRANGE', E, 0, -1) or {}) do
  local row = holder(of)
  if row and row[TOKEN] == token then over[#over + 1] = row end
end
forget('', now)
for _, row in ipairs(over) do
  drop(row)
  line[ENDED][#line[ENDED] + 1] = {row[OWNER], row[DIES] + REASON_TTL, ARGV[3]}
  ring(row, '!' .. ARGV[3])
end
settle()
save_all()
return #over

-- [pass on]
--   ARGV  2 owner, 3 ms of the heir, 4 heir, 5 label, 6 bell
local owner, ttl, heir = ARGV[2], tonumber(ARGV[3]), ARGV[4]
asked[heir] = true
settle()
local row, before = holder(owner), holder(heir) or waiting(heir)
if not row then waiting(owner) end -- that of a dead one goes
local answer
if row and not before then
  row[LABEL] = ARGV[5]
  if row[KIND] ~= 'reader' then row[TOKEN] = draw_token() end
  rename(row, heir, ttl, ARGV[6])
  answer = place(row)
elseif before then
  answer = keep(heir, ttl, 0)
else
  answer = gone(heir)
  if not answer[3] then answer = gone(owner) end
end
settle()
save_all()
return answer

-- [settle]
settle()
for number = first or line[DRAWN] + 1, line[DRAWN] do -- after a clock that was set back all live for less
  local of = redis.call('HGET', Q, string.format('n%.0f', number))
  if of then waiting(of) end
end
save_all()
return count

-- [keep many]
-- Those who hold alone, many names at once: nothing is unpacked.
--   KEYS  the first key of each
--   ARGV  1 'hybrid' or 'counter'; for each the number of its ticket, 8 bytes, owner and NUL in one text; ms
--   ->    one character for each: '1' it holds as before; '0' ask by [keep]
local time, answers, spans, heads, lifes = redis.call('TIME'), {}, {}, {}, {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local dead = struct.pack('>I8', now)
for at, key in ipairs(KEYS) do
  local ticket, ttl, saved = ARGV[2 * at], ARGV[2 * at + 1], redis.pcall('GETEX', key)
  if not heads[ttl] then
    heads[ttl], spans[ttl] = struct.pack('>I8', now + ttl), struct.pack('>I8', ttl)
    lifes[ttl] = ARGV[1] == 'hybrid' and {'PX', math.max(604800000, ttl)} or {}
  end
  answers[at] = '0'
  -- Big-endian, so they compare as texts. A longer ttl than ever, or a clock that was set back, is for [keep].
  if type(saved) == 'string' and string.sub(saved, 9, 16 + #ticket) == spans[ttl] .. ticket then
    local dies = string.sub(saved, 1, 8)
    if dies > dead and dies <= heads[ttl] then
      redis.call('SET', key, heads[ttl] .. string.sub(saved, 9), unpack(lifes[ttl]))
      answers[at] = '1'
    end
  elseif type(saved) == 'table' and not string.find(saved.err, '^WRONGTYPE') then
    return saved
  end
end
return table.concat(answers)

-- [look]
-- Who lives in the lines of names. It writes nothing: who could hold if the dead were passed over is shown as waiting.
--   KEYS  those of each
--   ARGV  1 how many keys a name has
--   ->    for each name {1 if the line is to be settled, {holder, ms left, ms since, token or -1, permit, mode, width,
--         label, number} of each ticket}, or 0 if the key holds something else
local time, found = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function look(S, Q, E)
  local saved, seen, count, unsettled = redis.pcall('GET', S), {}, 0, 0
  if type(saved) == 'table' and not string.find(saved.err, '^WRONGTYPE') then return saved end
  if not saved then return {0, seen} end
  local line = type(saved) == 'string' and line_in(saved)
  if not line then return 0 end
  if not Q then -- the slot is moving, and who waits is not shown
    if line[TOGETHER] then return redis.error_reply('TRYAGAIN the slot is moving') end
    line[WAITS] = 0
  end
  local function show(row, dies)
    if dies > now + row[LONGEST] then dies, unsettled = now + row[LONGEST], 1 end -- the clock was set back
    if dies <= now then
      unsettled = 1
      return false
    end
    seen[#seen + 1] = {string.sub(row[BELL], -32, -25), dies - now, now - row[SINCE], row[TOKEN] or -1, row[PERMIT],
                       row[KIND], row[WIDTH], row[LABEL], row[NUMBER]}
    return true
  end
  local function read(of)
    local packed = redis.call('HGET', Q, 'o' .. of)
    return packed and cmsgpack.unpack(string.sub(packed, 17))
  end
  if line[ALONE] then
    if show(line[ALONE], line[ALONE][DIES]) then count = 1 end
  elseif line[TOGETHER] then
    local held = redis.call('ZRANGE', E, 0, -1, 'WITHSCORES')
    for at = 1, #held, 2 do
      local row = read(held[at])
      if row and show(row, tonumber(held[at + 1])) or not row and tonumber(held[at + 1]) > now then count = count + 1 end
    end
  end
  local waits = false
  for number = line[WAITS] == 1 and tonumber(redis.call('HGET', Q, 'a') or line[DRAWN] + 1) or line[DRAWN] + 1, line[DRAWN] do
    local of = redis.call('HGET', Q, string.format('n%.0f', number))
    local row = of and read(of)
    if row and show(row, row[DIES]) and not waits then
      waits = true
      if count == 0 or row[KIND] == line[TOGETHER] and count < row[WIDTH] then unsettled = 1 end
    end
  end
  return {unsettled, seen}
end

local of_name = tonumber(ARGV[1])
for at = 1, #KEYS, of_name do
  local one = look(KEYS[at], KEYS[at + 1], KEYS[at + 2])
  if type(one) == 'table' and one.err then return one end
  found[#found + 1] = one
end
return found
