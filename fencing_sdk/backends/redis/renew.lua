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
