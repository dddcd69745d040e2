-- As acquire.lua, for a share: grant it where no other is held. Else share_acquire_beside.lua goes on.
--   KEYS  lease, last token, q, w, e, h
--   ARGV  as acquire.lua, then the mode and the number of permits
--   ->    {"TOKEN", permit or -1} granted | {ms left, 1 if the owner is in the line}
local lease, last, q, w, e, h = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local owner, ttl, metadata, kind, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local mode, permits = ARGV[7], ARGV[8]
local line = redis.pcall('PEXPIRE', q, 12000) -- a write that finds out whether there is a line
if type(line) == 'table' then return line end
local time = redis.call('TIME')

local function grant_alone()
  local permit = mode == 'permit' and 0 or -1
  local share = '=' .. mode .. '\0' .. owner .. '\0' .. permit .. '\0' .. permits .. '\0' .. metadata
  local token = grant(lease, last, '', ttl, share, kind, retention, false, time)
  return type(token) == 'string' and {token, permit} or token
end

if line == 0 then
  local granted = grant_alone()
  if granted then return granted end
end
