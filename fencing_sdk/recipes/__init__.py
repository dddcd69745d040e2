"""What is made of locks as they are: several at once, functions that need one, jobs that run once for each tick."""
