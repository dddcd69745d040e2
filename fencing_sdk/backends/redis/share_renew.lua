-- As renew.lua, for shares.
--   KEYS  lease, e and h for each; or of a single one only the lease, or the lease and e, while the slot moves
--   ARGV  owner and ttl in ms for each
local outcomes, now = {}, milliseconds()
for i = 1, math.ceil(#KEYS / 3) do
  local lease, e, h, owner, ttl = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i], ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = 'x'
  end
  local _, alone
  if is_shared(held) then _, alone = read_shared(held) end
  if not alone then
    outcomes[i] = held and 'x' or '0'
  elseif alone ~= '' then
    outcomes[i] = alone == owner and '1' or '0'
    if alone == owner then redis.call('PEXPIRE', lease, ttl) end
  elseif not e then
    return redis.error_reply('TRYAGAIN the share is in another key')
  else
    local ends = redis.call('ZSCORE', e, owner)
    outcomes[i] = ends and tonumber(ends) > now and '1' or '0'
    if outcomes[i] == '1' then
      redis.call('ZADD', e, string.format('%.0f', now + ttl), owner)
      settle(lease, e, h, now)
    end
  end
end
return table.concat(outcomes)
