-- Restart the ttl of every hold that is unbroken. Never creates a hold, and never revives one.
--   KEYS  epoch, holds
--   ARGV  epoch; for each hold: owner, number ('': any), ttl in ms
--   ->    one character for each: '1' renewed, '0' there is none, 'n' a later hold of the owner, 'x' another owner's
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local outcomes, renewed = {}, {}
for i = 2, #KEYS do
  local owner, number = ARGV[3 * i - 4], ARGV[3 * i - 3]
  local found = redis.pcall('GETEX', KEYS[i])
  if type(found) == 'table' and found.err then
    if not string.find(found.err, '^WRONGTYPE') then return found end
    found = '' -- the key holds something else; the other holds are renewed all the same
  end
  local held = found and read_hold(found)
  if not held then
    outcomes[i - 1] = '0'
  elseif held.owner ~= owner then
    outcomes[i - 1] = 'x'
  elseif number ~= '' and held.number ~= number then
    outcomes[i - 1] = 'n'
  else
    redis.call('PEXPIRE', KEYS[i], ARGV[3 * i - 2])
    renewed[#renewed + 1] = KEYS[i]
    outcomes[i - 1] = '1'
  end
end
-- Client tracking follows the keys that are read last: see the script of the same name for one server.
if #renewed > 0 then redis.pcall('EXISTS', unpack(renewed)) end
return table.concat(outcomes)
