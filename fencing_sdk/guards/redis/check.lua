-- The check in front of every script of RedisGuard. It decides as fencing_sdk/guards/__init__.py does.
--
-- Its lines are joined to one, so that the line numbers in an error message are those of the body. So a
-- comment needs a line of its own. The last of KEYS are the fences, one or more. The last of ARGV are a token and its
-- holder ('' if unknown) for each fence, and the number of fences. The check removes them from KEYS and ARGV, and the
-- body finds only its own. No fence is written before all have accepted.
--
-- {1, value} accepted    {0, number, holder, which} refused    {-1, which} the key holds something that is not a fence
local count = tonumber(table.remove(ARGV))
local asked = {}
for which = count, 1, -1 do
  local holder = table.remove(ARGV)
  asked[which] = {key = table.remove(KEYS), holder = holder, token = table.remove(ARGV)}
end

for which, claim in ipairs(asked) do
  claim.fence = redis.call('GET', claim.key)
  if claim.fence then
    -- The grammar of token_of_parts in fencing_sdk/_values/token.py, which reads what `highest` finds.
    local number, known = string.match(claim.fence, '^[0-9]+$'), ''
    if not number then number, known = string.match(claim.fence, '^([0-9]+) ([0-9a-f]+)$') end
    if not number or #number > 16 or #known > 64 or string.match(number, '^0.') then return {-1, which} end
    -- Below 2^53 a double is exact.
    local ahead, token = tonumber(number), tonumber(claim.token)
    if ahead >= 9007199254740992 then return {-1, which} end
    local conflict = ahead == token and known ~= '' and claim.holder ~= '' and known ~= claim.holder
    if ahead > token or conflict then return {0, number, known, which} end
    if ahead == token and claim.holder == '' then claim.holder = known end
  end
end

-- Store the token as the text in ARGV: Lua would print a large number with 14 digits. An unchanged fence is not
-- written, so that its holder can delete keys on a server that is full.
for _, claim in ipairs(asked) do
  local raised = claim.token
  if claim.holder ~= '' then raised = raised .. ' ' .. claim.holder end
  if raised ~= claim.fence then redis.call('SET', claim.key, raised) end
end
