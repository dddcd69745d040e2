"""
Twelve processes share one credential: when its access token has expired, one of them refreshes it, for all.

    uv run python examples/refresh_credential.py

The refresh token is used up by its use: the server answers with the next one, and if an old one comes again, it takes
that for theft and revokes them all. So a refresh is three steps under one lock: read, ask, write.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import httpx

from fencing_sdk.sync import LockClient, connect

PROCESSES = REFRESHES = 12

# A process


def access_token(locks: LockClient, http: httpx.Client, refused: str | None = None) -> str:
    """Return the access token. If the API has *refused* this one, refresh it, or wait for the process that does."""
    access, _ = credential()
    if access != refused:
        return access
    with locks.lock("credentials/bank", ttl=15, wait=60) as lease:
        access, refresh = credential()  # again, under the lock
        if access != refused:
            return access  # another process was quicker
        lease.check()  # the last moment: what is sent cannot be taken back
        answer = http.post("/token", data={"grant_type": "refresh_token", "refresh_token": refresh})
        new = answer.raise_for_status().json()
        store(new["access_token"], new["refresh_token"], used=refresh)
        return new["access_token"]


def credential() -> tuple[str, str]:
    with closing(sqlite3.connect(os.environ["CREDENTIALS"])) as db:
        return db.execute("SELECT access, refresh FROM credential").fetchone()


def store(access: str, refresh: str, *, used: str) -> None:
    """Replace the token that was used, and no other one. A late answer is the only copy of its successor: store it."""
    with closing(sqlite3.connect(os.environ["CREDENTIALS"])) as db, db:
        db.execute("UPDATE credential SET access = ?, refresh = ? WHERE refresh = ?", [access, refresh, used])


def process() -> None:
    client = httpx.Client(base_url=os.environ["BANK"], timeout=10, trust_env=False)
    with client as http, connect() as locks, locks.draining_on(signal.SIGTERM, signal.SIGINT, within=25):
        token = access_token(locks, http)
        while (answer := http.get("/balance", params={"token": token})).status_code != httpx.codes.GONE:
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                token = access_token(locks, http, refused=token)


# The bank


class Bank(BaseHTTPRequestHandler):
    number, calls, refused, reuses = 0, 0, 0, 0
    one_at_a_time = threading.Lock()

    def do_GET(self) -> None:
        with self.one_at_a_time:
            Bank.calls += 1
            expired = not self.path.endswith(f"=access-{Bank.number}") or Bank.calls > 50
            Bank.refused += expired
            self.answer(410 if expired and Bank.number == REFRESHES else 401 if expired else 200)

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        with self.one_at_a_time:
            if form["refresh_token"] != [f"refresh-{Bank.number}"]:
                Bank.reuses += 1
                self.answer(400)
                return
            Bank.number, Bank.calls = Bank.number + 1, 0
            self.answer(200, f'{{"access_token": "access-{Bank.number}", "refresh_token": "refresh-{Bank.number}"}}')

    def answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


def main(folder: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bank)
    threading.Thread(target=server.serve_forever).start()
    os.environ.update(
        BANK=f"http://127.0.0.1:{server.server_port}",
        CREDENTIALS=f"{folder}/credentials.db",
        FENCING_URL=f"sqlite:///{folder}/locks.db",
    )
    with closing(sqlite3.connect(os.environ["CREDENTIALS"])) as db, db:
        db.execute("CREATE TABLE credential (access TEXT, refresh TEXT)")
        db.execute("INSERT INTO credential VALUES ('access-0', 'refresh-0')")
    processes = [subprocess.Popen([sys.executable, __file__, "process"]) for _ in range(PROCESSES)]
    codes = [process.wait() for process in processes]
    server.shutdown()
    server.server_close()
    assert codes == [0] * PROCESSES
    assert (Bank.number, Bank.reuses) == (REFRESHES, 0)
    print(f"{PROCESSES} processes were refused {Bank.refused} times, and refreshed {Bank.number} times")


if __name__ == "__main__":
    if sys.argv[1:] == ["process"]:
        process()
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
