-- The hold of one lock on one node, for the scripts that use it: owner NUL number NUL token NUL attempt NUL metadata
--   number   what this node gave the hold; no later hold on this node has one as low
--   token    the token of the lease; until it is confirmed, the number
--   attempt  the attempt that has asked for the hold last

-- Whether the node may vote: it remembers the epoch. GETEX reads, but counts as a write: client tracking does not follow it.
local function votes(key, epoch)
  return redis.call('GETEX', key) == epoch
end

local NO_VOTE = 'EPOCH this node has another epoch, or has lost its memory'

local function read_hold(hold)
  local owner, number, token, attempt, metadata = string.match(hold, '^(%Z*)%z(%d+)%z(%d+)%z(%d+)%z(.*)$')
  return {owner = owner, number = number, token = token, attempt = attempt, metadata = metadata}
end

local function write_hold(key, owner, number, token, attempt, metadata, ttl)
  local hold = table.concat({owner, number, token, attempt, metadata}, '\0')
  return redis.pcall('SET', key, hold, 'PX', ttl)
end

-- Take the next number from the counter: the hint, if it is higher, but at most an hour ahead of this node's clock.
local function next_number(counter, hint)
  local number = (tonumber(redis.call('GETEX', counter)) or 0) + 1
  if tonumber(hint) > number then
    local ahead = (tonumber(redis.call('TIME')[1]) + 3600) * 1000000
    number = math.max(number, math.min(tonumber(hint), ahead))
  end
  if number >= 9007199254740992 then return nil end
  local digits = string.format('%.0f', number) -- number .. '' would keep only 14 digits
  redis.call('SET', counter, digits)
  return digits
end

local TOKEN_RANGE = 'TOKENRANGE the next token would not fit into 53 bits'
