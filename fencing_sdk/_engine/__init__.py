"""What a client runs while it is open: acquisitions, the heartbeat, leases, and the calls to the store."""
