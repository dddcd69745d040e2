"""
An outbox: messages are rows that are written with the data they tell of, and relays send them in batches.

    uv run python examples/outbox.py

Two relays are real processes. The first one freezes between sending its batch and finishing it. The second one takes
the rows over and sends them again, and when the first one thaws, its finish is refused. So each message is sent at
least once, in one finish for each batch, and the broker drops what it has by the key of the row.
"""

import asyncio
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from fencing_sdk import LeaseLostError
from fencing_sdk.rows import RowLease, row_client, schema_sql

TTL = 1.5  # seconds; in a service 30


@contextmanager
def transaction(path: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")


def open_shop(shop: str, broker: str) -> None:
    with closing(sqlite3.connect(shop)) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
        db.execute(
            "CREATE TABLE outbox (id INTEGER PRIMARY KEY, message TEXT NOT NULL, sent INTEGER NOT NULL DEFAULT 0)"
        )
        db.execute("CREATE INDEX outbox_next ON outbox (id) WHERE sent = 0")
        for statement in schema_sql("outbox", dialect="sqlite"):
            db.execute(statement)
    with closing(sqlite3.connect(broker)) as db:
        db.execute("CREATE TABLE delivered (id INTEGER PRIMARY KEY, message TEXT, times INTEGER NOT NULL DEFAULT 1)")


def place_order(shop: str, item: str) -> None:
    """The order and its message are one transaction: there is never one without the other."""
    with transaction(shop) as db:
        db.execute("INSERT INTO orders (item) VALUES (?)", [item])
        db.execute("INSERT INTO outbox (message) VALUES (?)", [f"ordered: {item}"])


def send(broker: str, lease: RowLease) -> None:
    """What stands for a broker: it drops a message whose key it knows, and here it counts how often it came."""
    sent = [(row["id"], row["message"]) for row in lease.rows]
    with transaction(broker) as db:
        db.executemany(
            "INSERT INTO delivered (id, message) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET times = times + 1", sent
        )
    print("sent", *(key for key, _ in sent), flush=True)


async def relay(shop: str, broker: str, *, freezes: bool) -> None:
    db = row_client(f"sqlite:///{shop}")
    messages = db.rows("outbox", where="sent = 0", ttl=TTL, poll=0.1)
    async with db, db.draining_on(signal.SIGTERM, within=25):
        async for batch in messages.batch(5):
            async with batch as lease:
                send(broker, lease)
                if freezes:
                    os.kill(os.getpid(), signal.SIGSTOP)  # the virtual machine is moved, for example
                try:
                    with transaction(shop) as connection:
                        await lease.finish(connection, sent=1)
                except LeaseLostError as error:
                    print("not finished:", error, flush=True)
                    return
    print("drained", flush=True)


async def start(role: str, shop: str, broker: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, role, shop, broker, stdout=asyncio.subprocess.PIPE
    )


async def said(process: asyncio.subprocess.Process, word: str) -> str:
    """Wait until a process has said something that begins with *word*."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode().strip():
        print(f"  {process.pid}: {line}")
        if line.startswith(word):
            return line
    raise AssertionError(word)


def unsent(shop: str) -> int:
    with closing(sqlite3.connect(shop, timeout=20)) as db:
        return db.execute("SELECT count(*) FROM outbox WHERE sent = 0").fetchone()[0]


async def main(folder: str) -> None:
    shop, broker = f"{folder}/shop.db", f"{folder}/broker.db"
    open_shop(shop, broker)
    for number in range(1, 13):
        place_order(shop, f"item {number}")

    print("the first relay freezes after it has sent its batch:")
    first = await start("freezes", shop, broker)
    await said(first, "sent")
    assert unsent(shop) == 12

    print("the second one takes over when the lease has run out:")
    second = await start("relay", shop, broker)
    while unsent(shop):  # noqa: ASYNC110  (in another process)
        await asyncio.sleep(0.1)
    second.send_signal(signal.SIGTERM)
    await said(second, "drained")
    assert await second.wait() == 0

    print("the first one thaws:")
    first.send_signal(signal.SIGCONT)
    assert "outbox/" in await said(first, "not finished")
    assert await first.wait() == 0

    with closing(sqlite3.connect(broker)) as db:
        times = [times for _, times in db.execute("SELECT id, times FROM delivered ORDER BY id")]
    assert times == [2] * 5 + [1] * 7, times
    print("the broker has all 12 messages, and 5 of them came twice")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [role, shop, broker]:
            asyncio.run(relay(shop, broker, freezes=role == "freezes"))
        case _:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(main(folder))
