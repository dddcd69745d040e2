-- As renew.lua, for shares.
--   KEYS  lease, e and h for each
--   ARGV  owner and ttl in ms for each
local outcomes, now = {}, milliseconds()
for i = 1, #KEYS / 3 do
  local lease, e, h, owner = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i], ARGV[2 * i - 1]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = 'x'
  end
  local ends = is_shared(held) and redis.call('ZSCORE', e, owner)
  if ends and tonumber(ends) > now then
    redis.call('ZADD', e, string.format('%.0f', now + ARGV[2 * i]), owner)
    settle(lease, e, h, now)
    outcomes[i] = '1'
  else
    outcomes[i] = held and not is_shared(held) and 'x' or '0'
  end
end
return table.concat(outcomes)
