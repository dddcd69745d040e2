-- The rest of share_release.lua.
local now, released = milliseconds(), 1
if not alone then
  if not is_shared(held) then return -1 end
  if select(2, read_shared(held)) ~= '' then return 0 end
  if ARGV[3] == '1' then redis.call('HDEL', h, owner) end
  local ends = redis.call('ZSCORE', e, owner)
  if not ends then return 0 end
  if tonumber(ends) <= now then released = 0 end -- its owner has lost it, although another share keeps the lease
  redis.call('ZREM', e, owner)
  drop_ended(e, h, now)
  settle(lease, e, h, now)
end
wake_fitting_head(lease, q, w, e, h, now, ARGV[2] == 'writer')
return released
