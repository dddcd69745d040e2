-- Return the lease, the ms until it ends, and for each share its owner, the ms until it ends, and its entry in h.
--   KEYS  lease, e, h
--   ->    {lease, ms left, owner, ms left, entry, ...} | nil
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' or not held then return held end
local found, now = {held, redis.call('PTTL', KEYS[1])}, milliseconds()
if is_shared(held) then
  local ends = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', now), '+inf', 'WITHSCORES')
  for i = 1, #ends, 2 do
    found[#found + 1] = ends[i]
    found[#found + 1] = math.ceil(tonumber(ends[i + 1]) - now)
    found[#found + 1] = redis.call('HGET', KEYS[3], ends[i]) or string.match(held, '^%z(%d+)%z') .. ' -1 0 '
  end
end
return found
