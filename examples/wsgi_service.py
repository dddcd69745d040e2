"""
A service of plain WSGI that refuses late requests, and a caller that uses requests: no asyncio on either side.

Run it: uv run python examples/wsgi_service.py
"""

import threading
from wsgiref.simple_server import WSGIRequestHandler, make_server

import requests

from fencing_sdk import StaleTokenError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.clients import FencingAdapter, raise_for_stale
from fencing_sdk.integrations.wsgi import GuardedApplication, request_token
from fencing_sdk.sync import connect

locks = connect("memory://", tokens="counter")  # within one process; several need a store
seats, guard = {}, MemoryGuard()


def book(environ, start_response):
    """The write is part of the check, so nothing comes in between."""
    resource, passenger = environ["PATH_INFO"].lstrip("/"), environ["QUERY_STRING"]
    guard.write(resource, request_token(environ), seats.__setitem__, resource, passenger)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"booked"]


class Silent(WSGIRequestHandler):
    def log_message(self, *args):
        pass


app = GuardedApplication(book, guard, resource="seats/{seat}", locks=locks)  # of Flask: app.wsgi_app
with make_server("127.0.0.1", 0, app, handler_class=Silent) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", FencingAdapter(origins=[url]))

        with locks.lock("seats/42") as lease:
            late = lease.headers()
            print("Ada:", session.put(f"{url}/seats/42?Ada").text)
        with locks.lock("seats/42"):
            print("Bob:", session.put(f"{url}/seats/42?Bob").text)
        try:
            raise_for_stale(session.put(f"{url}/seats/42?Eve", headers=late))
        except StaleTokenError as error:
            print("Eve:", error)
        assert session.put(f"{url}/seats/42?Eve").status_code == 428
    server.shutdown()
assert seats == {"seats/42": "Bob"}
