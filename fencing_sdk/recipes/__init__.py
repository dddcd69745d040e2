"""
What is made of locks as they are: a module for each recipe.

A recipe adds no protection of its own. Its leases are those of a lock: a deadline, a token, one heartbeat. A recipe is
handed what makes a lock and never the client, so that it can be read and tested alone.
"""
