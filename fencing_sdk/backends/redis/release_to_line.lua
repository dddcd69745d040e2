if released < 1 then
  redis.call('ZREM', q, owner)
  redis.call('HDEL', w, owner)
  if held then return released end
end
local _, failed = hand_on(lease, last, q, w, ARGV[2], ARGV[3], redis.call('TIME'))
return type(failed) == 'table' and failed or released
