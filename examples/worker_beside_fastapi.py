"""
A worker beside FastAPI: requests write rows, and tasks of the same service work on them, in as many processes as run.

    uv run python examples/worker_beside_fastapi.py

Each service is a real process under uvicorn. The first one is killed at its work, and its row is claimed by the second
one when the lease has run out. The second one gets SIGTERM, as in a deploy: it ends what it works on, claims nothing
new, and the third one does the rest. Each invoice is rendered once.
"""

import asyncio
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Response

from fencing_sdk.rows import RowLease, row_client, schema_sql

WORK = 0.5  # seconds


def service(path: str) -> FastAPI:
    db = row_client(f"sqlite:///{path}", drain=25)  # seconds that work gets when the service ends
    invoices = db.rows(
        "invoices", where="pdf IS NULL AND attempts < 5", on_claim="attempts = attempts + 1", ttl=1.5, poll=0.1
    )

    @invoices.each(at_once=2)
    async def render(lease: RowLease) -> None:
        say(f"renders {lease.row['id']}, attempt {lease.row['attempts']}")
        await asyncio.sleep(WORK)  # yours; cancelled if the lease is lost
        with transaction(path) as connection:
            await lease.finish(connection, pdf=f"invoice for {lease.row['customer']}")
        say(f"rendered {lease.row['id']}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with db:
            app.state.rendering = asyncio.create_task(render())
            yield
        await app.state.rendering  # the client has drained, so it ends; an error of its SQL is raised here

    app = FastAPI(lifespan=lifespan)

    @app.post("/invoices", status_code=202)
    def create(customer: str) -> int | None:
        with transaction(path) as connection:
            return connection.execute("INSERT INTO invoices (customer) VALUES (?)", [customer]).lastrowid

    @app.get("/ready")
    def ready(response: Response) -> int:
        """For a load balancer: a service whose worker has ended should be replaced."""
        status = db.status()
        response.status_code = 503 if status.draining or app.state.rendering.done() else 200
        return status.leases

    return app


@contextmanager
def transaction(path: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")


# The processes


def say(what: str) -> None:
    print(what, flush=True)


async def serve(path: str) -> None:
    server = uvicorn.Server(uvicorn.Config(service(path), host="127.0.0.1", port=0, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    say(f"listens {server.servers[0].sockets[0].getsockname()[1]}")
    await serving


class Process:
    """A service that runs, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process, self.name, self.said = process, name, []

    @classmethod
    async def started(cls, name: str, path: str) -> tuple["Process", str]:
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, path, stdout=asyncio.subprocess.PIPE, env=os.environ
            ),
            name,
        )
        return process, f"http://127.0.0.1:{(await process.says('listens')).split()[1]}"

    async def says(self, word: str) -> str:
        """Wait until it says something that begins with *word*."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode().strip():
            self.said.append(line)
            print(f"{self.name} {line}")
            if line.startswith(word):
                return line
        raise AssertionError(word)

    async def end(self, number: int) -> list[str]:
        """Send a signal, and return all that it has rendered."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        rest = (await self.process.stdout.read()).decode().splitlines()
        for line in rest:
            print(self.name, line)
        await self.process.wait()
        return [line for line in [*self.said, *rest] if line.startswith("rendered")]


def rows(path: str, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path, timeout=20)) as connection:
        return connection.execute(question).fetchall()


async def main(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE invoices"
            " (id INTEGER PRIMARY KEY, customer TEXT, pdf TEXT, attempts INTEGER NOT NULL DEFAULT 0)"
        )
        for statement in schema_sql("invoices", dialect="sqlite"):
            connection.execute(statement)

    killed, url = await Process.started("first: ", path)
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for number in range(8):
            (await client.post(f"{url}/invoices?customer={number}")).raise_for_status()
        assert (await client.get(f"{url}/ready")).status_code == 200
    await killed.says("renders")
    done = await killed.end(signal.SIGKILL)

    deployed, _ = await Process.started("second:", path)
    await deployed.says("renders")
    done += await deployed.end(signal.SIGTERM)
    assert rows(path, "SELECT id FROM invoices WHERE leased_until > 0 AND attempts > 1") == [], "it gave all of it back"

    last, _ = await Process.started("third: ", path)
    while rows(path, "SELECT id FROM invoices WHERE pdf IS NULL"):  # noqa: ASYNC110  (in another process)
        await asyncio.sleep(0.1)
    done += await last.end(signal.SIGTERM)

    assert rows(path, "SELECT count(pdf), count(*) FROM invoices") == [(8, 8)]
    assert len(set(done)) == len(done), "an invoice was rendered twice"
    again = rows(path, "SELECT id FROM invoices WHERE attempts > 1")
    print(f"all 8 invoices are rendered; {len(again)} of them began twice, as their first process was killed")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [path]:
            asyncio.run(serve(path))
        case _:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(main(f"{folder}/app.db"))
