"""
What is made of locks: a module for each recipe.

`semaphore` and `rwlock` need a backend that is a `SupportsShares`, the others work with every backend. A recipe adds no
protection of its own. Its leases are those of a lock: a deadline, a token, one heartbeat. A recipe is
handed what makes a lock and never the client, so that it can be read and tested alone.
"""
