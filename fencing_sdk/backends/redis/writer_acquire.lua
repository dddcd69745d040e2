-- Grant, repeat an earlier grant to the same owner, or refuse. With a line, acquire_in_line.lua goes on.
--   KEYS  lease, last token, q, w
--   ARGV  owner, ttl in ms, metadata, 'hybrid' or 'counter', ms that an idle counter is kept (0: for ever),
--         'fair' or 'barge' (a free lock goes to the first request)
--   ->    "TOKEN" granted | {ms left, 1 if the owner is in the line}
local lease, last, q, w = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, ttl, metadata, kind, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local line = redis.pcall('PEXPIRE', q, 12000) -- postpones the expiry of the line, if there is one
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
if line == 0 then return {redis.call('PTTL', lease), 0} end
