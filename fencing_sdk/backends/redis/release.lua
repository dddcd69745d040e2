-- Release the lock if the owner holds it. With a line, release_to_line.lua goes on: it takes the owner out of the line,
-- and hands the lock on.
--   KEYS  lease, last token, q, w; or only the lease, while the slot moves and the others are on another server
--   ARGV  owner, 'hybrid' or 'counter', ms that an idle counter is kept (0: for ever)
--   ->    1 released | 0 there is no lease | -1 another owner holds it
local lease, last, q, w, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then
  return string.find(held.err, '^WRONGTYPE') and -1 or held
end
local released = held and (string.sub(held, 1, #owner + 1) == owner .. '\0' and 1 or -1) or 0
if not q or redis.call('PEXPIRE', q, 12000) == 0 then
  if released == 1 then redis.call('DEL', lease) end
  return released
end
