-- Every line: a waiter without a sign of life for LINE_TTL has left it. Its keys expire when no waiter gives signs of life.
local LINE_TTL = 3000
local LINE_KEPT = 4 * LINE_TTL

local function milliseconds(time)
  time = time or redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
