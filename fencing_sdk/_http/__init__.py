"""HTTP for stores and guards: the nodes of a cluster, requests to them, and how certificates are checked."""
