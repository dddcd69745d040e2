-- Look at some keys: how long the longest of these holds lasts.
--   ARGV  cursor, pattern
--   ->    {next cursor, ms}
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500)
local longest = 0
for _, key in ipairs(found[2]) do longest = math.max(longest, redis.call('PTTL', key)) end
return {found[1], longest}
