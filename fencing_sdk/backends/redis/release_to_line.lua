wake_head(q, w)
return 1
