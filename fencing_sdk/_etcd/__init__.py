"""etcd's JSON gateway, for the backend and the guard."""
