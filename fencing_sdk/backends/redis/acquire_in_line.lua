-- The lock is free: it goes to the head of the line, which may be the owner.
local head = redis.call('ZRANGE', q, 0, 0)[1]
if ARGV[6] == 'fair' and head ~= owner then
  local handed, left, turn = hand_on(lease, last, q, w, kind, retention, redis.call('TIME'), {[owner] = true})
  if type(left) == 'table' then return left end
  if handed == owner then return string.match(redis.call('GETEX', lease), '^[0-9]+', #owner + 2) end
  if handed then return redis.call('PTTL', lease) end
  if left and turn ~= owner then return left end
end
redis.call('ZREM', q, owner)
redis.call('HDEL', w, owner)
return grant(lease, last, owner, ttl, metadata, kind, retention)
