"""The driver's side: opens connections, keeps one for the requests and one that listens, and closes them."""
