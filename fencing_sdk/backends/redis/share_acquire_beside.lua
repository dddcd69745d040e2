-- The rest of share_acquire.lua: the name is held, or has a line.
local held, now = redis.pcall('GETEX', lease), milliseconds(time)
if type(held) == 'table' then return held end
local shared, alone = is_shared(held), ''
if shared then
  local _, only, number = read_shared(held)
  if only == owner then
    redis.call('PEXPIRE', lease, ttl)
    return {string.match(held, '^%z(%d+)'), tonumber(number)}
  end
  alone = only
  if alone == '' then drop_ended(e, h, now) end
end
if shared and alone == '' and redis.call('ZSCORE', e, owner) then
  redis.call('ZADD', e, string.format('%.0f', now + ttl), owner)
  settle(lease, e, h, now)
  local token, permit = string.match(redis.call('HGET', h, owner) or '', '^(%d+) (-?%d+) ')
  return {token or string.match(held, '^%z(%d+)'), tonumber(permit or -1)}
end
line = line == 1 and keep_line(q, w)
local in_line = line and give_sign(w, owner, now) and 1 or 0
if not has_room(held, e, mode, permits) then
  local first = shared and alone == '' and redis.call('ZRANGE', e, 0, 0, 'WITHSCORES')[2]
  if not first then return {redis.call('PTTL', lease), in_line} end -- or the last share ends in this very millisecond
  return {math.ceil(tonumber(first) - now), in_line}
end
local number, readers_to = math.huge, 0
if line then
  if mode == 'reader' then number, readers_to = number_in_line(q, w, owner) end
  if number > readers_to and ARGV[6] == 'fair' then
    local head, _, left = head_of_line(q, w, now)
    if head and head ~= owner then
      if number < math.huge then readers_to = open_to_readers(q, w, readers_to) end
      if number > readers_to then return {left, in_line} end
    end
  end
end

local granted
if not held then
  granted = grant_alone()
  if not granted[1] then return granted end
else
  held = spread(lease, held, e, h, now)
  local token, permit = string.match(held, '^%z(%d+)'), -1
  if mode == 'permit' then
    token = grant(lease, last, '', ttl, '=permit', kind, retention, true, time)
    if type(token) == 'table' then
      redis.call('SET', lease, held)
      settle(lease, e, h, now)
      return token
    end
    local taken = {}
    for _, entry in ipairs(redis.call('HVALS', h)) do taken[string.match(entry, '^%d+ (%d+) ')] = true end
    permit = 0
    while taken[tostring(permit)] do permit = permit + 1 end
  end
  note(e, h, owner, now + ttl, token, permit, permits, metadata)
  settle(lease, e, h, now)
  granted = {token, permit}
end
if line then
  leave_line(q, w, owner)
  if mode ~= 'reader' then
    wake_fitting_head(lease, q, w, e, h, now)
  elseif number > readers_to - BOUNDARY then
    open_to_readers(q, w, readers_to)
  end
end
return granted
