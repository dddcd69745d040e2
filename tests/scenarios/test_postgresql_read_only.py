"""
A server that takes no writes and is no standby, as an old primary that an operator has fenced off.

The new primary is behind a proxy that makes it answer later, so that a client that takes the first answer takes the
wrong server every time.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from local_ports import HOST
from patience import until
from postgresql_proxy import PostgresqlProxy
from postgresql_replicas import Replicated
from postgresql_server import PostgresqlServer
from postgresql_stage import LISTENING, nothing_left, role, waiting
from stays import LONG, PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import BackendUnavailableError, Lost, RenewalFailed, Renewed
from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk.backends.postgresql import PostgresqlBackend

pytest_plugins = ["postgresql_fixtures"]

WHY = "default_transaction_read_only"
TOKEN = "SELECT token FROM fencing.fencing_lock WHERE name = 'a'"
ROWS = "SELECT name, owner, token, expires_at FROM fencing.fencing_lock ORDER BY name"
ORDERS = pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])


async def set_read_only(server: PostgresqlServer, *, on: bool = True) -> None:
    """Return when new sessions know; those that are open take their time."""
    await server.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
    await server.execute("SELECT pg_reload_conf()")

    async def known() -> bool:
        return await server.value("SHOW transaction_read_only") == ("on" if on else "off")

    await eventually(known, what="new sessions are read-only, or not any more")


@asynccontextmanager
async def slower(group: Replicated, *, old_first: bool = True) -> AsyncIterator[str]:
    """The URL of both servers, of which the standby, or the new primary, answers later."""
    async with PostgresqlProxy(group.standby) as proxy:
        proxy.delay(replies=0.1)
        hosts = [f"{HOST}:{group.primary.port}", f"{HOST}:{proxy.port}"]
        yield f"postgresql://postgres@{','.join(hosts if old_first else hosts[::-1])}/postgres"


# When a connection is opened.


@ORDERS
async def test_an_old_primary_that_is_read_only_is_passed_over(old_first, postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _), locks.lock("a") as lease:
        first = lease.token
    await group.synced()
    promoted = await group.promote()
    await set_read_only(group.primary)
    assert await group.primary.value("SELECT pg_is_in_recovery()") is False
    before = await group.primary.fetch(ROWS)
    async with slower(group, old_first=old_first) as url, opened(url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert first < lease.token == await promoted.value(TOKEN)
            waiter = Stay(locks.lock("a", wait=PATIENCE), work=0)
            await waiting(promoted, 1)
            await eventually(lambda: _listens_at(promoted), what="the waiter's client listens at the new primary")
        await waiter.over()
        assert waiter.error is None
    await nothing_left(group.primary)
    assert await group.primary.fetch(ROWS) == before


async def _listens_at(server: PostgresqlServer) -> bool:
    return bool(await server.fetch(LISTENING))


async def test_an_old_primary_without_the_tables_says_nothing_about_the_new_one(postgresql_group):
    group = postgresql_group
    promoted = await group.promote()
    await set_read_only(group.primary)
    async with opened(promoted.url) as (locks, _), locks.lock("a"):
        pass
    async with slower(group) as url, opened(url, create=False) as (locks, _), locks.lock("a", wait=PATIENCE):
        pass


async def test_the_tables_are_created_at_the_new_primary_though_the_old_one_has_them(postgresql_group):
    group = postgresql_group
    promoted = await group.promote()
    async with opened(group.primary.url) as (locks, _), locks.lock("a"):
        pass
    await set_read_only(group.primary)
    async with slower(group) as url:
        backend = PostgresqlBackend(url)
        await backend.create_schema()
        await backend.aclose()
    assert await promoted.value("SELECT count(*) FROM fencing.fencing_lock") == 0


async def test_one_host_that_is_read_only_is_named_as_the_reason_until_it_takes_writes(start_postgresql):
    server = start_postgresql(default_transaction_read_only=True)
    with pytest.raises(BackendUnavailableError, match=WHY):
        async with opened(server.url):
            pytest.fail("it opened")
    backend = PostgresqlBackend(server.url)
    with pytest.raises(BackendUnavailableError, match=WHY):
        await backend.acquire(Claim("a", 30.0))
    await set_read_only(server, on=False)
    assert isinstance(await backend.acquire(Claim("a", 30.0)), Grant)
    await backend.aclose()


async def test_a_role_that_may_only_read_is_told_why(postgresql_server):
    url = await role(postgresql_server, "default_transaction_read_only = on")
    with pytest.raises(BackendUnavailableError, match=WHY):
        async with opened(url):
            pytest.fail("it opened")
    await nothing_left(postgresql_server)


# Later.


async def test_a_holder_and_a_waiter_follow_when_their_server_becomes_read_only(postgresql_group, monkeypatch):
    monkeypatch.setattr("fencing_sdk.backends.postgresql.connection.listener._CHECK_EVERY", 1.0)
    group = postgresql_group
    async with slower(group) as url, opened(url) as (locks, log), opened(url) as (others, _):
        async with staying(locks.lock("a", **LONG | {"ttl": 40.0})) as stay:
            waiter = Stay(others.lock("a", ttl=30), work=0)
            await waiting(group.primary, 1)
            await log.seen(Renewed)
            await group.synced()
            await set_read_only(group.primary)
            await until(lambda: any(WHY in event.error for event in log.of(RenewalFailed)))
            before = await group.primary.fetch(ROWS)
            promoted = await group.promote()
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 2)
            assert await promoted.value(TOKEN) == stay.token
            await waiting(promoted, 1)
            await eventually(lambda: _listens_at(promoted), what="the waiter's client listens at the new primary")
            await stay.end()
        await waiter.over()
        assert waiter.error is None
        assert waiter.token > stay.token
        assert await group.primary.fetch(ROWS) == before
    assert log.of(Lost) == []


@pytest.mark.parametrize("call", ["acquire", "renew", "release"])
async def test_a_call_that_a_server_refuses_to_write_is_unavailable_and_applied_nowhere(call, postgresql_server):
    server = postgresql_server
    backend = PostgresqlBackend(server.url)
    held = Claim("a", 30.0)
    granted = await backend.acquire(held)
    ask = {
        "acquire": lambda: backend.acquire(Claim("b", 30.0)),
        "renew": lambda: backend.renew([held]),
        "release": lambda: backend.release(held),
    }
    await backend._connection.ask("SET default_transaction_read_only = on", ())  # as a reload does to this session
    before = await server.fetch(ROWS)
    with pytest.raises(BackendUnavailableError, match=WHY):
        await ask[call]()
    assert await server.fetch(ROWS) == before
    await ask[call]()  # on a new connection
    assert await server.fetch(ROWS) != before
    assert (await backend.acquire(held) == granted) is (call != "release")
    await backend.aclose()


@pytest.mark.parametrize("call", ["acquire", "inspect"])
async def test_what_a_server_that_became_read_only_remembers_is_no_answer(call, postgresql_server):
    """It would say for ever what was true before: that a lock is held, or by whom."""
    backend = PostgresqlBackend(postgresql_server.url)
    await backend.acquire(Claim("a", 30.0))
    ask = {"acquire": lambda: backend.acquire(Claim("a", 30.0)), "inspect": lambda: backend.inspect("a")}
    await backend._connection.ask("SET default_transaction_read_only = on", ())
    with pytest.raises(BackendUnavailableError, match=WHY):
        await ask[call]()
    answer = await ask[call]()
    assert isinstance(answer, Held) if call == "acquire" else answer is not None
    await backend.aclose()
