-- A place in the line of a lock (see waking_line.lua). Its score is the client's, so that all nodes have one order.
local function enter_line(q, w, owner, score, channel, ticket)
  local joined = redis.pcall('ZADD', q, 'NX', score, owner)
  if type(joined) == 'table' then return joined end
  redis.call('HSET', w, owner, string.format('%.0f', milliseconds()) .. ' PUBLISH ' .. channel .. ' ' .. ticket)
  keep_line(q, w)
  return 1
end
