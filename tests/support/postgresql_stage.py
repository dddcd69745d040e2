"""Stage of the scenarios on PostgreSQL: questions to the server about leases, lines and sessions."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from event_log import Log
from postgresql_server import BENCH_NAME, PostgresqlServer
from stays import LONG, PATIENCE, Stay, answered, eventually, none_left, opened, staying

from fencing_sdk import LockHeldError
from fencing_sdk.events import Lost, RenewalFailed, Renewed

LIVING = "ended IS NULL AND dies > clock_timestamp()"
LEFT = (
    "SELECT extract(epoch FROM dies - clock_timestamp())::float8 FROM fencing.fencing_ticket"
    f" WHERE name = $1 AND token IS NOT NULL AND {LIVING}"
)
ENDS = "SELECT (extract(epoch FROM dies) * 1000000)::int8 FROM fencing.fencing_ticket WHERE name = $1 AND token > 0"
TICKETS = f"SELECT name FROM fencing.fencing_ticket WHERE {LIVING}"
LINE = f"SELECT count(*) FROM fencing.fencing_ticket WHERE name = $1 AND token IS NULL AND {LIVING}"
OTHERS = f"datname = current_database() AND backend_type = 'client backend' AND application_name <> '{BENCH_NAME}'"
SESSIONS = f"SELECT pid, query, usename FROM pg_stat_activity WHERE {OTHERS}"
LISTENING = f"SELECT pid FROM pg_stat_activity WHERE {OTHERS} AND query ILIKE 'listen%'"


NEEDED = """
    GRANT USAGE ON SCHEMA fencing TO app;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencing TO app
"""
"""Rights that a role needs in a schema that another role has created."""


async def role(server: PostgresqlServer, setting: str = "", options: str = "") -> str:
    """Make a user with a setting who may create what is needed; its URL."""
    await server.execute(f"CREATE ROLE app LOGIN {options}; GRANT ALL ON DATABASE {server.database} TO app")
    if setting:
        await server.execute(f"ALTER ROLE app SET {setting}")
    return server.url_as("app")


async def sessions(server: PostgresqlServer) -> list[Any]:
    """The connections to the database of the test, without those of the bench."""
    return await server.fetch(SESSIONS)


async def terminate(server: PostgresqlServer, which: str = "true") -> int:
    """Terminate the connections *which* are meant, as an administrator does; how many there were."""
    found = await server.fetch(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OTHERS} AND ({which})")
    return len(found)


async def line(server: PostgresqlServer, name: str = "a") -> int:
    """Count those who wait for a lock."""
    return int(await server.value(LINE, name)) if await _known(server) else 0


async def waiting(server: PostgresqlServer, number: int, name: str = "a", *, within: float = PATIENCE) -> None:
    async def all_wait() -> bool:
        return await line(server, name) == number

    await eventually(all_wait, what=f"{number} wait", within=within)


async def _known(server: PostgresqlServer) -> bool:
    return await server.value("SELECT to_regclass('fencing.fencing_ticket')") is not None


async def leavings(server: PostgresqlServer) -> list[object]:
    """Tickets and connections."""
    found: list[object] = [record["query"] for record in await sessions(server)]
    if await _known(server):
        found += [record["name"] for record in await server.fetch(TICKETS)]
    return found


async def nothing_left(server: PostgresqlServer, *, within: float = PATIENCE) -> None:
    """See that no lease, no line and no connection remains."""
    await none_left(lambda: leavings(server), within=within)


@asynccontextmanager
async def idle_in_transaction(server: PostgresqlServer, statement: str, *arguments: object) -> AsyncIterator[Any]:
    """A session that ran *statement* in a transaction and then idles."""
    async with server.connected() as session:
        transaction = session.transaction()
        await transaction.start()
        await session.execute(statement) if not arguments else await session.fetch(statement, *arguments)
        yield session
        await transaction.rollback()


def everything_shown_by(error: BaseException) -> str:
    """What logging, a traceback, repr or a pickle would show of an error and of all that caused it."""
    chain, texts = [error], ["".join(traceback.format_exception(error)), repr(pickle.dumps(error))]
    while chain:
        found = chain.pop()
        texts += [repr(found), str(found), repr(vars(found))]
        chain += [cause for cause in (found.__cause__, found.__context__) if cause is not None]
    return "\n".join(texts)


def refusals(log: Log) -> list[str]:
    """Why renewals failed, other than by a server, or a transaction of it, that a busy machine held up."""
    slow = ("no answer", "the connection was given up")
    errors = [event.error for event in log.of(RenewalFailed)]
    return [error for error in errors if error and not any(words in error for words in slow)]


async def everything_works(url: str, **options: Any) -> None:
    """Everything that locks do: grant, retry, wait, wake, renew, give up waiting, inspect, release."""
    async with opened(url, **options) as (locks, log):
        async with staying(locks.lock("a", **LONG)) as stay:
            waiter = Stay(locks.lock("a", ttl=10, wait=PATIENCE))
            leaving = Stay(locks.lock("a", ttl=10, wait=PATIENCE))
            await log.seen(Renewed)
            await leaving.abandon()
            with pytest.raises(LockHeldError):
                await answered(locks.lock("a", wait=0).acquire)
            assert (await answered(lambda: locks.inspect("a"))).token == stay.token
            await log.seen(Renewed, 2)
            await stay.end()
        await waiter.begun()
        await waiter.end()
        async with locks.lock("a", ttl=10) as lease:
            await answered(lease.renew)
        assert refusals(log) == log.of(Lost) == []
