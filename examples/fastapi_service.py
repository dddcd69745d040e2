"""
Two services and one lock: a box office books seats at a seats service, over HTTP, with real servers.

    uv run python examples/fastapi_service.py

Ada's request hangs at the bank for longer than its lease lasts. When it goes on, the seat is Bob's: the hook of the
HTTP client does not send her booking, and the copy of it that a slow network delivers is refused by the seats service.
"""

import asyncio
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated

import httpx
import uvicorn
from fastapi import FastAPI, Response

from fencing_sdk import Lease, LeaseLostError, LockClient, StaleTokenError, Token, connect
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.clients import fencing_hook, raise_for_stale
from fencing_sdk.integrations.fastapi import Leased, Presented, answer_problems, lifespan


def seats_service(database: Path) -> FastAPI:
    """Owns the seats. Its check is part of the transaction that books."""
    app, guard = FastAPI(), SqlGuard(database)
    answer_problems(app)  # a StaleTokenError is 409

    @app.put("/seats/{seat}")
    def write(seat: str, who: str, token: Annotated[Token, Presented()]) -> str:
        with closing(sqlite3.connect(database)) as connection, connection:  # one transaction
            guard.admit_sync(connection, f"seats/{seat}", token)
            connection.execute("UPDATE seats SET holder = ? WHERE seat = ?", (who, seat))
        return who

    return app


class Bank:
    """Charges cards. Its answer to Ada's charge takes longer than her lease lasts."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.was_asked = threading.Event()
        self.answers_ada = threading.Event()

    def charge(self, who: str) -> None:
        self.charged.append(who)
        self.was_asked.set()
        if who == "Ada":
            self.answers_ada.wait(30)


def box_office(locks: LockClient, seats_url: str, bank: Bank) -> FastAPI:
    """Holds the lock while it charges and books."""
    app = FastAPI(lifespan=lifespan(locks))
    answer_problems(app)  # a lost lease is 503, a lock that is taken 423
    hook = fencing_hook(origins=[seats_url])  # the token goes there, and nowhere else

    @app.get("/ready")
    def ready(response: Response) -> dict[str, object]:
        """For a load balancer. To lead an election is not to be ready: see docs/operations.md."""
        status = locks.status()
        response.status_code = 200 if status.open and not status.draining else 503
        return {"leases": status.leases, "least_remaining": status.least_remaining, "leader_of": status.leader_of}

    @app.post("/bookings/{seat}")
    def book(
        seat: str,
        who: str,
        lease: Annotated[Lease, Leased(locks, "seats/{seat}", ttl=5, max_hold=3.5, wait=20)],
    ) -> str:
        """A plain function: it runs in a thread, and a thread cannot be cancelled."""
        print(f"{who} holds the lock with token {lease.token}")
        on_the_wire = lease.headers()
        bank.charge(who)
        url = f"{seats_url}/seats/{seat}?who={who}"
        try:
            with httpx.Client(event_hooks={"request": [hook]}, trust_env=False) as client:
                client.put(url).raise_for_status()
        except LeaseLostError as error:
            print(f"{who}: not sent: {error}")
            deliver_late(url, on_the_wire, who)
            bank.charged.remove(who)
            raise
        print(f"{who} has the seat")
        return who

    return app


def deliver_late(url: str, headers: dict[str, str], who: str) -> None:
    """What a proxy does that kept the request for a while. No lease of this process can stop it."""
    with httpx.Client(trust_env=False) as proxy:
        response = proxy.put(url, headers=headers)
    print(f"{who}: sent late: {response.status_code} {response.headers['content-type']}")
    try:
        raise_for_stale(response)
    except StaleTokenError as error:
        print(f"{who}: refused: {error}")


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Run uvicorn on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


def open_theatre(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE seats (seat TEXT PRIMARY KEY, holder TEXT)")
        connection.execute("INSERT INTO seats VALUES ('42', NULL)")


def holder(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT holder FROM seats WHERE seat = '42'").fetchone()[0]


async def main(folder: Path) -> None:
    open_theatre(folder / "seats.db")
    bank, locks = Bank(), connect(f"sqlite:///{folder}/locks.db")
    async with (
        served(seats_service(folder / "seats.db")) as seats_url,
        served(box_office(locks, seats_url, bank)) as office_url,
        httpx.AsyncClient(base_url=office_url, timeout=30, trust_env=False) as buyers,
    ):
        ada = asyncio.create_task(buyers.post("/bookings/42?who=Ada"))
        await asyncio.to_thread(bank.was_asked.wait, 20)
        ready = await buyers.get("/ready")
        print(f"the box office is ready: {ready.status_code}, with {ready.json()['leases']} lease")
        bob = await buyers.post("/bookings/42?who=Bob")
        assert bob.status_code == 200

        bank.answers_ada.set()
        answer = await ada
        print(f"Ada gets {answer.status_code} {answer.json()['title']}, retry after {answer.headers['retry-after']} s")
        assert answer.status_code == 503

    assert holder(folder / "seats.db") == "Bob", "the late write got through"
    assert bank.charged == ["Bob"]
    print("the seat is Bob's, and Bob alone has paid")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
