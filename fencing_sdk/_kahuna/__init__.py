"""Requests to a Kahuna node over REST, for the backend and the guard."""
