-- End the owner's share, or the lease of a writer, and wake the head of the line if there is room for it.
--   KEYS  lease, q, w, e, h
--   ARGV  owner, its mode, '1' if it has an entry in h
--   ->    1 released | 0 the owner holds nothing
local lease, q, w, e, h, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[1]
if ARGV[2] == 'writer' then
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return string.find(held.err, '^WRONGTYPE') and 0 or held end
  if not held or string.sub(held, 1, #owner + 1) ~= owner .. '\0' then return 0 end
  redis.call('DEL', lease)
else
  if ARGV[3] == '1' then redis.call('HDEL', h, owner) end
  if redis.call('ZREM', e, owner) == 0 then return 0 end
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then return held end
  if is_shared(held) and redis.call('EXISTS', e) == 0 then
    redis.call('DEL', lease)
  elseif is_shared(held) then
    local now = milliseconds()
    drop_ended(e, h, now)
    settle(lease, e, h, now)
  end
end
if redis.call('EXISTS', q) == 1 then wake_fitting_head(lease, q, w, e, h, milliseconds()) end
return 1
