"""What only PostgreSQL can show when it fails under a holder: sessions that are terminated, and openings given up."""

import asyncio

import pytest
from postgresql_stage import nothing_left, sessions, terminate
from stays import LONG, eventually, opened, staying

from fencing_sdk import (
    BackendUnavailableError,
    Lost,
    Renewed,
)
from fencing_sdk.backends.postgresql import from_url
from fencing_sdk.backends.postgresql.connection import dial

pytest_plugins = ["postgresql_fixtures"]


# The connection breaks.


@pytest.mark.every_loop
async def test_a_connection_terminated_again_and_again_costs_nothing_and_leaves_one(postgresql_server):
    ended: set[int] = set()

    async def connected_again() -> set[int]:
        """The one connection, once those that were terminated are gone: both take the server some time."""
        pids = {session["pid"] for session in await sessions(postgresql_server)}
        return pids if len(pids) == 1 and not pids & ended else set()

    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(4):
            ended |= await eventually(connected_again, what="there is one connection")
            await terminate(postgresql_server)
            await eventually(connected_again, what="there is one connection, and a new one")
            await log.seen(Renewed, len(log.of(Renewed)) + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


# The client gives up at the very moment when a connection has been opened.


@pytest.mark.every_loop
async def test_an_opening_that_is_cancelled_when_it_has_succeeded_leaves_no_connection(postgresql_server, monkeypatch):
    backend = from_url(postgresql_server.url)
    choose = dial._first_success

    async def choose_and_be_cancelled(tasks):
        chosen = await choose(tasks)
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        return chosen

    monkeypatch.setattr(dial, "_first_success", choose_and_be_cancelled)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(backend._dialer.dial())
    assert await eventually(lambda: none_left(postgresql_server), what="no connection is left", within=5)


@pytest.mark.every_loop
async def test_a_backend_that_is_closed_when_its_connection_has_been_opened_leaves_none(postgresql_server, monkeypatch):
    backend = from_url(postgresql_server.url)
    closing = []
    open_one = backend._dialer.dial

    async def open_and_be_closed():
        session = await open_one()
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: closing.append(loop.create_task(backend._connection.aclose())))
        return session

    monkeypatch.setattr(backend._dialer, "dial", open_and_be_closed)
    with pytest.raises(BackendUnavailableError):
        await backend.inspect("a")
    await closing[0]
    assert await eventually(lambda: none_left(postgresql_server), what="no connection is left", within=5)


async def none_left(server) -> bool:
    return not await sessions(server)
