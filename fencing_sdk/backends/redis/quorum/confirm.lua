-- Raise a hold, and the counter, to the token of the lease. Neither ever falls.
--   KEYS  epoch, counter, hold
--   ARGV  epoch, owner, number of the hold, token, ttl in ms
--   ->    1 | 0 it is another hold now
local key, number, token = KEYS[3], ARGV[3], ARGV[4]
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local found = redis.pcall('GETEX', key)
if type(found) == 'table' and found.err then return found end
local held = found and read_hold(found)
if not held or held.owner ~= ARGV[2] or held.number ~= number then return 0 end
if tonumber(token) > tonumber(number) then number = token end
if tonumber(redis.call('GETEX', KEYS[2]) or '0') < tonumber(number) then redis.call('SET', KEYS[2], number) end
local written = write_hold(key, held.owner, number, token, held.attempt, held.metadata, ARGV[5])
return written.err and written or 1
