-- A waiter for a share, or a writer that waits, leaves the line: the waiters behind a writer may fit beside those who hold.
--   KEYS  lease, q, w, e, h
--   ARGV  owner
--   ->    1
leave_line(KEYS[2], KEYS[3], ARGV[1])
wake_fitting_head(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], milliseconds())
return 1
