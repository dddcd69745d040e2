"""The tables: created once by many, in any schema, and cleaned up without lowering a token."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from stays import PATIENCE

from fencing_sdk import connect
from fencing_sdk._values.claim import LOCK, READER, TOKEN_LIMIT, Claim, Grant, Permit, Renewal
from fencing_sdk.backends.postgresql import PostgresqlBackend, schema
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

pytest_plugins = ["postgresql_fixtures"]

HOSTILE = ['a"b', "select", "a'; DROP TABLE x; --", "$fencing1$$fencing2$", "Ünder Score", "a.b", ",", "\\", "x" * 63]


@pytest.mark.parametrize("schema", HOSTILE)
async def test_a_schema_may_have_nearly_any_name(schema, postgresql_server):
    async with connect(postgresql_server.url, schema=schema) as locks:
        async with locks.lock("a") as lease:
            await lease.renew()
        found = await postgresql_server.value("SELECT count(*) FROM pg_namespace WHERE nspname = $1", schema)
    assert found == 1


async def test_many_clients_may_create_the_tables_at_once(postgresql_server, monkeypatch):
    patient = schema._TEXT.replace("lock_timeout = '250ms'", "lock_timeout = '10s'")  # while the machine stands still
    assert patient != schema._TEXT
    monkeypatch.setattr(schema, "_TEXT", patient)
    backends = [PostgresqlBackend(postgresql_server.url) for _ in range(12)]
    outcomes = await asyncio.gather(*(backend.acquire(Claim("a", 30.0)) for backend in backends))
    await asyncio.gather(*(backend.aclose() for backend in backends))
    assert sum(isinstance(outcome, Grant) for outcome in outcomes) == 1


async def test_without_create_a_missing_schema_names_the_way_out(postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url, create=False)
    with pytest.raises(BackendRefusedError, match="fencing init"):
        await backend.acquire(Claim("a", 30.0))
    await backend.create_schema()
    assert isinstance(await backend.acquire(Claim("a", 30.0)), Grant)
    await backend.aclose()


async def test_tables_dropped_under_a_client_are_created_again(postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    first = await backend.acquire(Claim("a", 30.0))
    await postgresql_server.execute("DROP SCHEMA fencing CASCADE")
    second = await backend.acquire(Claim("a", 30.0))
    await backend.aclose()
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert second.token > first.token


@pytest.mark.parametrize("known", [False, True])
async def test_a_grant_is_durable_whatever_the_database_says(known, postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    await backend.open()
    if known:  # a row that is there and free is granted by a shorter way
        await backend.acquire(claim := Claim("a", 30.0))
        await backend.release(claim)
    await postgresql_server.execute(f"ALTER DATABASE {postgresql_server.database} SET synchronous_commit = off")
    async with postgresql_server.connected() as connection, connection.transaction():
        assert await connection.fetchval("SHOW synchronous_commit") == "off"
        statement, arguments = backend._requests.acquisition(Claim("a", 30.0), None, None)
        await connection.fetchrow(statement, *arguments)
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
    async with postgresql_server.connected() as connection, connection.transaction():
        arguments = backend._requests.renew_arguments([Claim("a", 30.0)], 0)
        await connection.fetchrow(backend._requests.renew, *arguments)
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
    await backend.aclose()


async def sweep(server, seconds=0.0):
    await server.execute("UPDATE fencing.fencing_floor SET swept_at = '-infinity', swept_to = ''")
    return await server.value("SELECT fencing.fencing_sweep($1)", seconds)


async def test_a_sweep_deletes_what_is_free_and_never_lowers_a_token(postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url, tokens="counter")
    for _ in range(3):
        claim = Claim("a", 30.0)
        await backend.acquire(claim)
        await backend.release(claim)
    held = Claim("b", 30.0)
    await backend.acquire(held)
    assert await sweep(postgresql_server, 3600.0) == 0
    assert await sweep(postgresql_server) == 1
    assert await postgresql_server.value("SELECT fencing.fencing_sweep(0)") == 0  # not twice within a minute
    assert await backend.acquire(Claim("a", 30.0)) == Grant(4)
    assert await backend.acquire(Claim("new", 30.0)) == Grant(4)
    assert await backend.renew([held]) == [Renewal.RENEWED]
    await backend.aclose()


async def test_an_acquisition_that_waits_for_a_sweep_sees_its_floor(postgresql_server):
    """A sweep is deleting the row while a client acquires the lock: its token must not be forgotten."""
    backend = PostgresqlBackend(postgresql_server.url, tokens="counter")
    claim = Claim("a", 30.0)
    for _ in range(2):
        await backend.acquire(claim)
        await backend.release(claim)
    async with postgresql_server.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert await connection.fetchval("SELECT fencing.fencing_sweep(0)") == 1
        asked = asyncio.create_task(backend.acquire(Claim("a", 30.0)))
        await blocked(postgresql_server, asked)
        await transaction.commit()
    try:
        outcome = await asked
    except BackendUnavailableError:  # it waited for longer than a call may
        outcome = await backend.acquire(Claim("a", 30.0))
    assert outcome == Grant(3)
    await backend.aclose()


async def blocked(server, asked):
    """Wait until a session waits for a row, or until the call has failed because it waited for too long."""
    while not asked.done():
        if await server.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            return
    assert isinstance(asked.exception(), Exception), "the call did not have to wait"


@pytest.mark.parametrize("release", ["fencing_give_back", "fencing_release"])
async def test_joining_the_line_waits_for_a_release_that_is_under_way(release, postgresql_server):
    """A release that has looked at an empty line, and is not committed yet, would be missed."""
    backend = PostgresqlBackend(postgresql_server.url)
    holder, waiter = Claim("a", 30.0), Claim("a", 30.0)
    await backend.acquire(holder)
    join = backend._requests.join, (waiter.name, waiter.owner, "channel", "1", None, "lock", None)
    async with postgresql_server.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert await connection.fetchval(f"SELECT fencing.{release}($1, $2)", holder.name, holder.owner) == "1"
        asked = asyncio.create_task(backend._connection.ask(*join))
        await blocked(postgresql_server, asked)
        await transaction.commit()
    await asyncio.wait([asked])
    await backend._connection.ask(*join)
    assert isinstance(await backend.acquire(waiter), Grant)
    await backend.aclose()


async def test_a_row_that_another_transaction_keeps_locked_costs_the_other_leases_nothing(postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    claims = [Claim(name, 30.0) for name in "abc"]
    for claim in claims:
        await backend.acquire(claim)
    async with postgresql_server.connected() as connection, connection.transaction():
        await connection.execute("SELECT FROM fencing.fencing_lock WHERE name = 'b' FOR UPDATE")
        outcomes = await backend.renew(claims)
    assert outcomes == [Renewal.RENEWED, Renewal.UNKNOWN, Renewal.RENEWED]
    assert await backend.renew(claims) == [Renewal.RENEWED] * 3
    await backend.aclose()


@pytest.mark.parametrize("mode", [LOCK, READER, Permit(of=2)], ids=lambda mode: mode.word)
async def test_a_token_that_would_not_fit_is_refused_in_every_mode(mode, postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    await backend.acquire(claim := Claim("a", 30.0))
    await backend.release(claim)
    await postgresql_server.execute(f"UPDATE fencing.fencing_lock SET token = {TOKEN_LIMIT - 1}")
    with pytest.raises(BackendRefusedError, match="53 bits"):
        await backend.acquire(Claim("a", 30.0, mode=mode))
    assert await backend.inspect("a") is None
    await backend.aclose()


@pytest.mark.parametrize("call", ["acquire", "release"])
async def test_a_call_waits_for_a_locked_row_for_a_bounded_time(call, postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    await backend.acquire(claim := Claim("a", 30.0))
    if call == "acquire":
        await backend.release(claim)
    async with postgresql_server.connected() as connection, connection.transaction():
        await connection.execute("SELECT FROM fencing.fencing_lock WHERE name = 'a' FOR UPDATE")
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(BackendUnavailableError):
                await (backend.acquire(claim) if call == "acquire" else backend.release(claim))
    await backend.aclose()


async def test_a_snapshot_from_before_the_row_was_locked_grants_nothing(postgresql_server):
    """In a transaction that is not READ COMMITTED, the line would be seen as it was before."""
    backend = PostgresqlBackend(postgresql_server.url)
    await backend.acquire(claim := Claim("a", 30.0))
    await backend.release(claim)
    acquire = backend._requests.acquisition(Claim("a", 30.0), None, None)
    release = backend._requests.release, (claim.name, claim.owner)
    for isolation in ("repeatable_read", "serializable"):
        for statement, arguments in (acquire, release):
            async with postgresql_server.connected() as connection:
                with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
                    async with connection.transaction(isolation=isolation):
                        await connection.fetchrow(statement, *arguments)
    await backend.aclose()
