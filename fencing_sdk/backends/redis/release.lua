-- Ends of grants by their holders.

-- [release]
-- Release the name if the owner holds it. A share goes on in [release beside] where others hold the name; where there is a
-- line, [release in line] serves it.
--   KEYS  lease, last, q, w; for a share, and for an owner that may wait, also e, h; or only the lease, while the slot
--         moves and the others are on another server: then a share in e is not released
--   ARGV  kind, retention, owner; for a share also '1' if it has an entry in h; 'leave' behind that for a waiter that was
--         to be woken only: it leaves the line, and a grant of its owner stays
--   ->    1 released | 0 the owner holds nothing | -1 another owner holds the name
local owner, noted, leaves = ARGV[3], ARGV[4], ARGV[5] == 'leave'
local held = redis.pcall('GETEX', KEYS[1])
if type(held) == 'table' then
  return string.find(held.err, '^WRONGTYPE') and -1 or held
end
local released, beside = held and (string.sub(held, 1, #owner + 1) == owner .. '\0' and 1 or -1) or 0, false
if noted and held and string.sub(held, 1, 1) == '\0' then
  local only = string.match(held, '^%z%d+%z=%a+%z(%Z*)%z')
  released, beside = only == owner and 1 or 0, not only
end
if leaves then released, beside = 0, false end
if beside and not KEYS[3] then return redis.error_reply('TRYAGAIN the share is in another key') end
local line = KEYS[3] and redis.call('PEXPIRE', KEYS[3], 12000) == 1
if not line and not beside then
  if released == 1 then redis.call('DEL', KEYS[1]) end
  return released
end

-- [release beside]
local time = redis.call('TIME')
if beside then
  local now, ends = milliseconds(time), redis.call('ZSCORE', e, owner)
  if ends then
    if tonumber(ends) > now then released = 1 end -- else its owner has lost it, although another share keeps the lease
    redis.call('ZREM', e, owner)
    if noted == '1' then redis.call('HDEL', h, owner) end
    drop_ended(now)
    settle(now)
  end
  if not line then return released end
  held = redis.call('GETEX', lease)
end

-- [release in line]
if released == 1 then
  if not beside then held = false end -- serving writes the lease anew, or deletes it
else
  leave_line(owner)
  if is_shared(held) then
    if not e then return released end
    drop_ended(milliseconds(time))
  end
end
local _, failed = serve(held, time)
-- The grant has ended, so a line that cannot be served makes no error of it.
return type(failed) == 'table' and released < 1 and failed or released
