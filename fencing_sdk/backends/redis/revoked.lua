-- Return the reason for which an owner's grant was revoked.
--   KEYS  x: a hash, owner -> reason
--   ARGV  owner
--   ->    reason | nil
local reason = redis.pcall('HGET', KEYS[1], ARGV[1])
return type(reason) == 'string' and reason or nil
