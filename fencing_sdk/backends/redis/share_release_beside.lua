-- The rest of share_release.lua.
local now = milliseconds()
if not alone then
  if not is_shared(held) then return -1 end
  if select(2, read_shared(held)) ~= '' then return 0 end
  if ARGV[3] == '1' then redis.call('HDEL', h, owner) end
  if redis.call('ZREM', e, owner) == 0 then return 0 end
  drop_ended(e, h, now)
  settle(lease, e, h, now)
end
wake_fitting_head(lease, q, w, e, h, now, ARGV[2] == 'writer')
return 1
