-- Grant a lock: return its token in digits, or an error; or nil if the lock is not free and another owner holds it.
-- The lease is written first: one command finds out whether the lock is free, and takes it.
local function grant(lease, last, owner, ttl, metadata, kind, retention, free, time)
  local token = 1
  if kind == 'hybrid' then
    time = time or redis.call('TIME')
    token = tonumber(time[1]) * 1000000 + tonumber(time[2])
  end
  local digits = string.format('%.0f', token) -- token .. '' would keep only 14 digits
  local taken = redis.pcall('SET', lease, owner .. '\0' .. digits .. '\0' .. metadata, 'PX', ttl, free and 'GET' or 'NX')
  if not taken and not free then return nil end
  if type(taken) == 'table' and taken.err then return taken end
  local before
  if retention == '0' then
    before = redis.pcall('SET', last, digits, 'GET')
  else
    before = redis.pcall('SET', last, digits, 'PX', retention, 'GET')
  end
  if not before then return digits end
  local higher, problem = tonumber(before), 'ERR the last token is no number'
  if higher and higher < token then return digits end
  if higher then
    token, problem = higher + 1, 'TOKENRANGE the next token would not fit into 53 bits'
    if token < 9007199254740992 then
      digits = string.format('%.0f', token)
      redis.call('SET', lease, owner .. '\0' .. digits .. '\0' .. metadata, 'PX', ttl)
      redis.call('SET', last, digits, 'KEEPTTL')
      return digits
    end
  end
  redis.call('DEL', lease)
  if type(before) == 'table' then return before end -- an error: the key is not written
  redis.call('SET', last, before, 'KEEPTTL')
  return redis.error_reply(problem)
end
