"""
Two workers sell one seat. The first one hangs, loses its lock, and is refused when it writes at last.

    uv run python examples/seat_booking.py

The lock is in one SQLite file, the seats are in another. The guard is part of the transaction that
books the seat, so the database refuses the late worker, and the worker gives the money back.
"""

import asyncio
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

from fencing_sdk import LeaseLostError, LockClient, StaleTokenError, connect
from fencing_sdk.guards.sql import SqlGuard

SEAT = "seats/42"


class Bank:
    """Charges cards. Its answer to Ada's charge takes longer than her lease lasts."""

    def __init__(self) -> None:
        self.charged: set[str] = set()
        self.answers_ada = threading.Event()

    def charge(self, who: str) -> None:
        self.charged.add(who)
        if who == "Ada":
            self.answers_ada.wait(30)

    def refund(self, who: str) -> None:
        self.charged.remove(who)


class BoxOffice:
    """Sells seats, one buyer for each."""

    def __init__(self, locks: LockClient, database: Path, bank: Bank) -> None:
        self.locks = locks
        self.database = database
        self.bank = bank
        self.guard = SqlGuard(database)  # the fences stand beside the seats

    async def sell(self, who: str) -> None:
        lock = self.locks.lock(SEAT, ttl=5, max_hold=3.5, wait=20, fences=[self.guard])
        async with lock as lease:
            print(f"{who} holds the lock with token {lease.token}")
            await asyncio.to_thread(self.charge_and_book, who, lease.token)
            print(f"{who} has the seat")

    def charge_and_book(self, who: str, token: int) -> None:
        """Runs in a thread, and a thread cannot be cancelled."""
        self.bank.charge(who)
        try:
            with closing(sqlite3.connect(self.database)) as connection, connection:  # one transaction
                self.guard.admit_sync(connection, SEAT, token)
                connection.execute("UPDATE seats SET holder = ? WHERE seat = ?", (who, SEAT))
        except StaleTokenError as error:
            self.bank.refund(who)
            print(f"{who} is too late and gets the money back: {error}")

    def holder(self) -> str | None:
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute("SELECT holder FROM seats WHERE seat = ?", (SEAT,)).fetchone()[0]


def open_theatre(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE seats (seat TEXT PRIMARY KEY, holder TEXT)")
        connection.execute("INSERT INTO seats VALUES (?, NULL)", (SEAT,))


async def main(folder: Path) -> None:
    open_theatre(folder / "seats.db")
    bank = Bank()
    async with connect(f"sqlite:///{folder}/locks.db") as locks:
        office = BoxOffice(locks, folder / "seats.db", bank)
        try:
            await office.sell("Ada")
        except LeaseLostError as error:
            print(f"Ada's worker was stopped, her thread goes on: {error}")

        await office.sell("Bob")
        bank.answers_ada.set()
        await asyncio.get_running_loop().shutdown_default_executor()  # wait for Ada's thread

        assert office.holder() == "Bob", "the late write got through"
        assert bank.charged == {"Bob"}
        print(f"the seat is {office.holder()}'s, and {office.holder()} alone has paid")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
