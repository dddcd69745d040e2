"""The driver's side: the one thread that touches SQLite, and the open file."""
