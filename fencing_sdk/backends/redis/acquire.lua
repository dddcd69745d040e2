-- Grant, or repeat an earlier grant to the same owner. Else acquire_refuse.lua and acquire_in_line.lua go on; for a
-- writer, which stands in the line of shares, writer_acquire.lua.
--   KEYS  lease, last token, q, w
--   ARGV  owner, ttl in ms, metadata, 'hybrid' or 'counter', ms that an idle counter is kept (0: for ever),
--         'fair' or 'barge' (a free lock goes to the first request)
--   ->    "TOKEN" granted | what goes on answers, with the ms until another try makes sense (-1: the lease has no ttl)
local lease, last, q, w = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, ttl, metadata, kind, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local line = redis.pcall('PEXPIRE', q, 12000) -- a write that finds out whether there is a line
if type(line) == 'table' then return line end
if line == 0 then
  local token = grant(lease, last, owner, ttl, metadata, kind, retention)
  if token then return token end
end

-- GETEX reads, but counts as a write: a replica refuses it, and client tracking does not follow the key.
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return held end
if held and string.sub(held, 1, #owner + 1) == owner .. '\0' then
  redis.call('PEXPIRE', lease, ttl)
  return string.match(held, '^[0-9]+', #owner + 2)
end
