-- As acquire.lua, for a share.
--   KEYS  lease, last token, q, w, e, h
--   ARGV  as acquire.lua, then the mode and the number of permits
--   ->    {"TOKEN", permit or -1} granted | {ms left, 1 if the owner is in the line}
local lease, last, q, w, e, h = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local owner, ttl, metadata, kind, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local mode, permits = ARGV[7], ARGV[8]
local line = keep_line(q, w)
local now = milliseconds()
local ends = string.format('%.0f', now + ttl)

local function note(token, permit)
  redis.call('ZADD', e, ends, owner)
  if permit < 0 and metadata == '' then return end
  redis.call('HSET', h, owner, token .. ' ' .. permit .. ' ' .. permits .. ' ' .. metadata)
end

if not line then -- most names are free: no command is spent to find that out
  local token = grant(lease, last, '', ttl, '=' .. mode, kind, retention)
  if type(token) == 'table' then return token end
  if token then
    local permit = mode == 'permit' and 0 or -1
    redis.call('DEL', e, h)
    note(token, permit)
    redis.call('PEXPIRE', e, ttl)
    if permit >= 0 or metadata ~= '' then redis.call('PEXPIRE', h, ttl) end
    return {token, permit}
  end
end

local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
local shared = is_shared(held)
if shared then drop_ended(e, h, now) else redis.call('DEL', e, h) end
if redis.call('ZSCORE', e, owner) then
  redis.call('ZADD', e, ends, owner)
  settle(lease, e, h, now)
  local token, permit = string.match(redis.call('HGET', h, owner) or '', '^(%d+) (-?%d+) ')
  return {token or string.match(held, '^%z(%d+)%z'), tonumber(permit or -1)}
end
local in_line = line and give_sign(w, owner, now) and 1 or 0
if not has_room(held, e, mode, permits) then
  if not shared then return {redis.call('PTTL', lease), in_line} end
  local first = redis.call('ZRANGE', e, 0, 0, 'WITHSCORES')[2]
  if not first then return {redis.call('PTTL', lease), in_line} end -- the last share ends in this very millisecond
  return {math.ceil(tonumber(first) - now), in_line}
end
if line then
  local head, _, left = head_of_line(q, w, now)
  if ARGV[6] == 'fair' and head and head ~= owner then return {left, in_line} end
end

local token
if shared and mode == 'reader' then
  token = string.match(held, '^%z(%d+)%z')
else
  local left = shared and redis.call('PTTL', lease)
  if shared then redis.call('DEL', lease) end
  token = grant(lease, last, '', ttl, '=' .. mode, kind, retention)
  if type(token) == 'table' then
    if shared then redis.call('SET', lease, held, 'PX', math.max(1, left)) end
    return token
  end
end
local permit = -1
if mode == 'permit' then
  local taken = {}
  for _, entry in ipairs(redis.call('HVALS', h)) do taken[string.match(entry, '^%d+ (%d+) ')] = true end
  permit = 0
  while taken[tostring(permit)] do permit = permit + 1 end
end
note(token, permit)
settle(lease, e, h, now)
if line then
  leave_line(q, w, owner)
  wake_fitting_head(lease, q, w, e, h, now, true)
end
return {token, permit}
