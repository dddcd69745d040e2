"""The driver's side: kazoo in threads of its own, its sessions in the event loop, and how they reach a server."""
