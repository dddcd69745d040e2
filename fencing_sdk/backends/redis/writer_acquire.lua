-- The rest of acquire.lua for a writer.
--   ->    "TOKEN" granted | {ms left, 1 if the owner is in the line}
if line == 0 then return {redis.call('PTTL', lease), 0} end
redis.call('PEXPIRE', w, LINE_KEPT)
if held or redis.call('ZRANGE', q, 0, 0)[1] ~= owner then
  local now = milliseconds()
  local in_line = give_sign(w, owner, now) and 1 or 0
  if held then return {redis.call('PTTL', lease), in_line} end
  local head, _, left = head_of_line(q, w, now)
  if ARGV[6] == 'fair' and head and head ~= owner then return {left, in_line} end
end
leave_line(q, w, owner)
return grant(lease, last, owner, ttl, metadata, kind, retention)
