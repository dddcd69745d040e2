"""The running part of an open client: acquisitions, the heartbeat, leases, and the calls to the store."""
