-- Renewals of what is held.

-- [renew]
-- Restart the ttl of every lease that its owner still holds. Never creates a lease, and never revives one.
--   KEYS  leases
--   ARGV  owner and ttl in ms for each
--   ->    one character for each: '1' renewed, '0' there is none, 'x' another owner holds it
local outcomes, renewed = {}, {}
for i, lease in ipairs(KEYS) do
  local owner = ARGV[2 * i - 1]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' and held.err then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = '' -- the key holds something else; the other leases are renewed all the same
  end
  if not held then
    outcomes[i] = '0'
  elseif string.sub(held, 1, #owner + 1) == owner .. '\0' then
    redis.call('PEXPIRE', lease, ARGV[2 * i])
    renewed[#renewed + 1] = lease
    outcomes[i] = '1'
  else
    outcomes[i] = 'x'
  end
end
-- Client tracking follows the keys that are read, so read the renewed leases, after the writes. One command reads
-- all of them, because before Redis 7.2 every read in a script makes the server follow all keys of the script.
if #renewed > 0 then redis.pcall('EXISTS', unpack(renewed)) end
return table.concat(outcomes)

-- [renew shares]
-- As [renew], for shares.
--   KEYS  lease, e and h for each; or of a single one only the lease, or the lease and e, while the slot moves
--   ARGV  owner and ttl in ms for each
local outcomes, now = {}, milliseconds()
for i = 1, math.ceil(#KEYS / 3) do
  lease, e, h = unpack(KEYS, 3 * i - 2, 3 * i)
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = 'x'
  end
  if not is_shared(held) then
    outcomes[i] = held and 'x' or '0'
  elseif is_spread(held) and not e then
    return redis.error_reply('TRYAGAIN the share is in another key')
  else
    outcomes[i] = has_share(held, owner, now) and '1' or '0'
    if outcomes[i] == '1' then extend(held, owner, ttl, now) end
  end
end
return table.concat(outcomes)

-- [check shares]
-- Whether owners still have their shares of a name. Unlike a renewal it changes nothing, so no other client gets a notice.
--   KEYS  lease, e
--   ARGV  owners
--   ->    one character for each, as [renew]
lease, e = KEYS[1], KEYS[2]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if not is_shared(held) then return string.rep(held and 'x' or '0', #ARGV) end
local found, now = {}, milliseconds()
for i, owner in ipairs(ARGV) do found[i] = has_share(held, owner, now) and '1' or '0' end
return table.concat(found)
