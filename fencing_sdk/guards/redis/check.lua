-- Stands in front of every script of RedisGuard and decides as fencing_sdk/guards/_verdict.py does.
--
-- It is joined to one line, so that an error message counts the lines of what follows: a comment
-- here has a line of its own. The last of KEYS is the fence; the last of ARGV are the token, its
-- holder ('' where it is unknown) and the retention in ms ('0': for ever). They are taken off, so
-- what follows finds KEYS and ARGV of its own.
--
-- {1, value} accepted    {0, number, holder} refused    {-1} what stands at the key is no fence
local key = table.remove(KEYS)
local retention = table.remove(ARGV)
local holder = table.remove(ARGV)
local token = table.remove(ARGV)

local fence = redis.call('GET', key)
if fence then
  local number, known = string.match(fence, '^%d+$'), ''
  if not number then number, known = string.match(fence, '^(%d+) (%x+)$') end
  if not number then return {-1} end
  -- Both are below 2^53, where a double is exact.
  local ahead, asked = tonumber(number), tonumber(token)
  local conflict = ahead == asked and known ~= '' and holder ~= '' and known ~= holder
  if ahead > asked or conflict then return {0, number, known} end
  if ahead == asked and holder == '' then holder = known end
end

-- The token stays the text it came as: Lua would print a large number with 14 digits. A fence that
-- stays as it is is not written, so that its holder may delete on a server that is full.
local raised = token
if holder ~= '' then raised = token .. ' ' .. holder end
if retention ~= '0' then
  -- Not PEXPIRE: after a write that a full server allows, it would allow all others of this script.
  redis.call('SET', key, raised, 'PX', retention)
elseif raised ~= fence then
  redis.call('SET', key, raised)
elseif redis.call('PTTL', key) ~= -1 then
  redis.call('PERSIST', key)
end
