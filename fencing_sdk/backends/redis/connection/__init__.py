"""The driver's side: finds the servers, opens one connection to each, and sends the scripts."""
