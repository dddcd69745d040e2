-- End the owner's share, or the lease of a writer. If it is in e, or there is a line, share_release_beside.lua goes on.
--   KEYS  lease, q, w, e, h; or only the lease, while the slot moves: then a share in e is not released
--   ARGV  owner, its mode, '1' if it has an entry in h
--   ->    1 released | 0 the owner holds nothing | -1 another owner holds the name alone
local lease, q, w, e, h, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[1]
local held = redis.pcall('GETEX', lease)
if type(held) == 'table' then return string.find(held.err, '^WRONGTYPE') and -1 or held end
if not held then return 0 end
local alone = (string.match(held, '^%z%d+%z=%a+%z(%Z*)%z') or string.match(held, '^%Z*')) == owner
if alone then
  redis.call('DEL', lease)
  if not q or redis.call('PEXPIRE', q, 12000) == 0 then return 1 end
end
if not q then return redis.error_reply('TRYAGAIN the share is in another key') end
