-- Runs the caller's commands in order, up to the first that fails. The error is then the last of the replies.
-- ARGV: for each command, the number of its words and then the words.
local replies, at = {}, 1
while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  local reply = redis.pcall(unpack(ARGV, at + 1, last))
  replies[#replies + 1] = reply
  if type(reply) == 'table' and reply.err then break end
  at = last + 1
end
return replies
