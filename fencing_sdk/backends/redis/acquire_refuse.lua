-- Refuse, unless the lock is free and has a line: then the functions of the line are needed.
if held or line == 0 then return redis.call('PTTL', lease) end
