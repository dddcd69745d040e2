"""
Two workers sell one seat, with the locks, the fences and the seats in one PostgreSQL.

    uv run python examples/seat_booking_postgresql.py postgresql://me@localhost/app

Each worker is a process. The first one is frozen (SIGSTOP) while the bank is charging the card, loses
its lock, and wakes up too late. Its booking runs in a thread, which cannot be cancelled: the database
itself refuses it, in the transaction that would have booked the seat, and the worker gives the money back.

The database may also be named by FENCING_URL. The example makes a table example_seats and drops it.
"""

import asyncio
import os
import signal
import subprocess
import sys

from sqlalchemy import create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencing_sdk import LeaseLostError, StaleTokenError, connect
from fencing_sdk.guards.sql import SqlGuard

SEAT = 42


class Base(DeclarativeBase):
    pass


class Seat(Base):
    __tablename__ = "example_seats"
    number: Mapped[int] = mapped_column(primary_key=True)
    holder: Mapped[str | None]


def engine_for(url: str):
    return create_engine("postgresql+psycopg://" + url.partition("://")[2])


# What a worker does. Its standard input and output are its line to the bank.


async def sell(url: str, who: str) -> None:
    guard = SqlGuard(url)
    engine = engine_for(url)
    try:
        async with connect(url) as locks, locks.lock(f"seats/{SEAT}", ttl=2, wait=30, fences=[guard]) as lease:
            say(f"{who}'s worker holds the lock with token {lease.token}")
            await asyncio.to_thread(charge_and_book, engine, guard, who, lease.token)
    except LeaseLostError as error:
        say(f"{who}'s worker has lost the lock: {error}")
    finally:
        await asyncio.get_running_loop().shutdown_default_executor()  # the thread goes on until it is done
        engine.dispose()


def charge_and_book(engine, guard: SqlGuard, who: str, token: int) -> None:
    say(f"charge {who}")
    sys.stdin.readline()  # the bank's answer takes its time
    try:
        with Session(engine) as session, session.begin():
            guard.admit_sync(session, f"seats/{SEAT}", token)  # first: it holds the fence until the commit
            session.execute(update(Seat).where(Seat.number == SEAT).values(holder=who))
        say(f"{who} has the seat")
    except StaleTokenError as error:
        say(f"refund {who}")
        say(f"{who} is too late and gets the money back: {error}")


def say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: two threads have something to say


# The bank, which also sees to it that the story happens.


class Bank:
    def __init__(self, url: str) -> None:
        self.url = url
        self.charged: set[str] = set()

    def worker(self, who: str) -> subprocess.Popen[str]:
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), __file__, self.url, who]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def listen(self, worker: subprocess.Popen[str]) -> None:
        """Serve a worker until it waits for an answer, or has ended."""
        for line in worker.stdout:
            verb, _, who = line.strip().partition(" ")
            if verb == "charge":
                self.charged.add(who)
                return
            if verb == "refund":
                self.charged.remove(who)
            else:
                print(line, end="")

    def answer(self, worker: subprocess.Popen[str]) -> None:
        worker.stdin.write("paid\n")
        worker.stdin.flush()


def main(url: str) -> None:
    engine, bank = engine_for(url), Bank(url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Seat(number=SEAT))

    with bank.worker("Ada") as ada:
        try:
            bank.listen(ada)
            ada.send_signal(signal.SIGSTOP)
            print("Ada's worker is frozen while the bank charges her card")

            with bank.worker("Bob") as bob:
                bank.listen(bob)
                bank.answer(bob)
                bank.listen(bob)

            bank.answer(ada)
            ada.send_signal(signal.SIGCONT)
            bank.listen(ada)
        finally:
            ada.send_signal(signal.SIGCONT)
    assert ada.returncode == bob.returncode == 0, "a worker has failed"

    with Session(engine) as session:
        holder = session.get(Seat, SEAT).holder
    Base.metadata.drop_all(engine)
    engine.dispose()
    assert holder == "Bob", "the late write got through"
    assert bank.charged == {"Bob"}
    print(f"the seat is {holder}'s, and {holder} alone has paid")


if __name__ == "__main__":
    match sys.argv[1:] or [url for url in [os.environ.get("FENCING_URL")] if url]:
        case [url]:
            main(url)
        case [url, who]:
            asyncio.run(sell(url, who))
        case _:
            sys.exit("name a database: seat_booking_postgresql.py postgresql://me@localhost/app, or set FENCING_URL")
