-- Whether owners still have their shares of a name. Unlike a renewal it changes nothing, so no other client is told of it.
--   KEYS  lease, e
--   ARGV  owners
--   ->    one character for each, as renew.lua
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' then return held end
if not is_shared(held) then return string.rep(held and 'x' or '0', #ARGV) end
local _, alone = read_shared(held)
local found, now = {}, milliseconds()
for i, owner in ipairs(ARGV) do
  local ends = alone == '' and redis.call('ZSCORE', KEYS[2], owner)
  found[i] = (owner == alone or (ends and tonumber(ends) > now)) and '1' or '0'
end
return table.concat(found)
