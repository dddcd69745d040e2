-- Return why grants were revoked.
--   KEYS  the note of each: token NUL revocation NUL reason
--   ->    for each the reason, or '' if there is no note
local reasons = {}
for i, key in ipairs(KEYS) do
  local noted = redis.pcall('GETEX', key)
  reasons[i] = type(noted) == 'string' and string.match(noted, '^%d+%z%Z*%z(.*)$') or ''
end
return reasons
