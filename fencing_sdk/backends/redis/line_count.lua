-- How many wait in a line.
local COUNTED = 64 -- in a longer line, waiters that have gone without leaving are counted too

-- Return their number; without a permission for it nil, and the error.
local function count_line(q, w, now)
  local count = redis.pcall('ZCARD', q)
  if type(count) == 'table' then
    if string.find(count.err, '^WRONGTYPE') then return 0 end
    return nil, count
  end
  if count == 0 or count > COUNTED then return count end
  local signs = redis.pcall('HVALS', w)
  if signs.err then return nil, signs end
  count = 0
  for _, sign in ipairs(signs) do
    local age = now - (tonumber(string.match(sign, '^%d+')) or 0)
    if age > -LINE_TTL and age < LINE_TTL then count = count + 1 end
  end
  return count
end
