"""Clusters that speak HTTP: endpoints, connections, TLS and options, for backends and guards."""
