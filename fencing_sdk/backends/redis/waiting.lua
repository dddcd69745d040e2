-- Return a stretch of a line, in order of arrival.
--   KEYS  q, w
--   ARGV  number of arrival after which it begins, most waiters
--   ->    {number of arrival, owner, sign of life, ...}
local arrivals = redis.pcall('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if arrivals.err then return arrivals end
local now, found = milliseconds(redis.call('TIME')), {}
for i = 1, #arrivals, 2 do
  local sign = redis.call('HGET', KEYS[2], arrivals[i]) or ''
  local age = now - (tonumber(string.match(sign, '^%d+')) or 0)
  found[#found + 1] = arrivals[i + 1]
  found[#found + 1] = arrivals[i]
  found[#found + 1] = age > -LINE_TTL and age < LINE_TTL and sign or ''
end
return found
