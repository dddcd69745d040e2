-- Give leases that a majority has renewed a new hold on this node, which has lost theirs: but not if they were revoked.
--   KEYS  epoch; for each lease: counter, hold, note
--   ARGV  epoch, hint; for each lease: owner, token, attempt, ttl in ms, metadata
--   ->    for each lease the number of its hold, or '0': another owner has the lock here, or it was revoked
if not votes(KEYS[1], ARGV[1]) then return redis.error_reply(NO_VOTE) end
local numbers, made = {}, {}
for i = 1, (#KEYS - 1) / 3 do
  local counter, key, note = unpack(KEYS, 3 * i - 1, 3 * i + 1)
  local owner, token, attempt, ttl, metadata = unpack(ARGV, 5 * i - 2, 5 * i + 2)
  local found = redis.pcall('GETEX', key)
  local noted = redis.call('GETEX', note)
  local revoked = noted and string.match(noted, '^%d+') == token
  local readable = type(found) ~= 'table' and not revoked
  local held = readable and found and read_hold(found)
  local number
  if held then
    number = held.owner == owner and held.number
  elseif readable then
    number = next_number(counter, ARGV[2])
  end
  if number and not write_hold(key, owner, number, token, attempt, metadata, ttl).err then
    made[#made + 1] = key
    numbers[i] = number
  else
    numbers[i] = '0'
  end
end
if #made > 0 then redis.pcall('EXISTS', unpack(made)) end
return numbers
