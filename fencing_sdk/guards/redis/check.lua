-- The check in front of every script of RedisGuard. It decides as fencing_sdk/guards/_verdict.py does.
--
-- Its lines are joined to one, so that the line numbers in an error message are those of the body. So a
-- comment needs a line of its own. The last of KEYS is the fence. The last of ARGV are the token, its holder
-- ('' if unknown) and the retention in ms ('0': for ever). The check removes them from KEYS and ARGV, and the
-- body finds only its own.
--
-- {1, value} accepted    {0, number, holder} refused    {-1} the key holds something that is no fence
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

-- Store the token as the text in ARGV: Lua would print a large number with 14 digits. An unchanged fence is not
-- written, so that its holder can delete keys on a server that is full.
local raised = token
if holder ~= '' then raised = token .. ' ' .. holder end
if retention ~= '0' then
  -- Not PEXPIRE: a full server allows it, and then allows every other write of this script.
  redis.call('SET', key, raised, 'PX', retention)
elseif raised ~= fence then
  redis.call('SET', key, raised)
elseif redis.call('PTTL', key) ~= -1 then
  redis.call('PERSIST', key)
end
