-- Restart the ttl of every lease that is still its owner's. Never creates, never revives.
--   KEYS  leases
--   ARGV  owner and ttl in ms for each
--   ->    one character each: '1' renewed, '0' gone, 'x' somebody else's
local outcomes, renewed = {}, {}
for i, lease in ipairs(KEYS) do
  local owner = ARGV[2 * i - 1]
  local held = redis.pcall('GETEX', lease)
  if type(held) == 'table' and held.err then
    if not string.find(held.err, '^WRONGTYPE') then return held end
    held = '' -- something else is there, which must not cost the other leases theirs
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
-- A read after the writes: client tracking follows these leases from here on. It is one read, because
-- before Redis 7.2 every read in a script makes the server note down all keys of the script.
if #renewed > 0 then redis.pcall('EXISTS', unpack(renewed)) end
return table.concat(outcomes)
