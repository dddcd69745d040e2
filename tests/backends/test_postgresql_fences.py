"""Locks and fences in one database: the grant and the fence come together, or not at all."""

import asyncio
import contextlib

import pytest

from fencing_sdk import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    FenceRaised,
    StaleTokenError,
    connect,
)
from fencing_sdk.abc import Claim, Grant, Held, Token
from fencing_sdk.backends.postgresql import PostgresqlBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.sql import SqlGuard

pytest_plugins = ["postgresql_fixtures"]

SEAT = "seats/42"


@pytest.fixture
async def backend(postgresql_server):
    backend = PostgresqlBackend(postgresql_server.url)
    yield backend
    await backend.aclose()


@pytest.fixture
def guard(postgresql_server):
    return SqlGuard(postgresql_server.url)


async def granted(backend, fences, **claim) -> Grant:
    answer = await backend.acquire_fenced(Claim(SEAT, 60.0, **claim), fences)
    assert isinstance(answer, Grant)
    return answer


@contextlib.asynccontextmanager
async def writing(server, guard, token):
    """A transaction that writes under the fence and does not commit."""
    async with server.connected() as connection, connection.transaction():
        await guard.admit(connection, SEAT, token)
        yield


def test_a_guard_of_the_same_database_is_known_by_what_both_were_told(backend, guard, postgresql_server):
    assert backend.keeps(guard)
    assert not backend.keeps(SqlGuard())
    assert not backend.keeps(MemoryGuard())
    assert not backend.keeps(SqlGuard("sqlite:///app.db"))
    assert not backend.keeps(SqlGuard(postgresql_server.url_as("another role")))
    assert not backend.keeps(SqlGuard(f"{postgresql_server.url}_other"))
    assert not PostgresqlBackend(postgresql_server.url, driver={"host": "elsewhere"}).keeps(guard)


async def test_the_fence_is_raised_in_the_transaction_of_the_grant(backend, guard, postgresql_server):
    claim = Claim(SEAT, 60.0)
    grant = await backend.acquire_fenced(claim, [(guard, SEAT), (guard, "seats/plan")])
    assert isinstance(grant, Grant)
    for resource in (SEAT, "seats/plan"):
        fence = await guard.highest(resource)
        assert (fence, fence.holder) == (grant.token, claim.holder)
    statement = "SELECT xmin::text FROM {} WHERE {} = $1"
    lock = await postgresql_server.value(statement.format("fencing.fencing_lock", "name"), SEAT)
    assert await postgresql_server.value(statement.format("fencing_fence", "resource"), SEAT) == lock


async def test_a_fence_that_is_higher_already_means_no_grant(backend, guard):
    far = 2**52
    await guard.raise_to(SEAT, Token(far, "a0a0a0a0"))
    with pytest.raises(StaleTokenError) as refused:
        await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)])
    assert refused.value.fence == far
    assert await backend.inspect(SEAT) is None
    assert isinstance(await backend.acquire(Claim(SEAT, 60.0)), Grant)  # nothing is held up


async def test_with_one_fence_of_two_refused_the_other_is_not_raised(backend, guard):
    await guard.raise_to("seats/plan", Token(2**52, "a0a0a0a0"))
    with pytest.raises(StaleTokenError):
        await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT), (guard, "seats/plan")])
    assert await guard.highest(SEAT) is None


async def test_the_same_owner_again_gets_the_same_and_a_refusal_raises_nothing(backend, guard):
    claim = Claim(SEAT, 60.0)
    first = await backend.acquire_fenced(claim, [(guard, SEAT)])
    assert await backend.acquire_fenced(claim, [(guard, SEAT)]) == first
    assert isinstance(await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, "other")]), Held)
    assert await guard.highest("other") is None


async def test_a_fence_that_a_transaction_holds_delays_no_renewal(backend, guard, postgresql_server):
    """A transaction that writes under the fence holds it until it ends; heartbeats use another connection."""
    before = await granted(backend, [(guard, SEAT)])
    other = Claim("other", 60.0)
    await backend.acquire(other)
    await postgresql_server.execute("UPDATE fencing.fencing_lock SET expires_at = now() WHERE name = 'seats/42'")
    async with writing(postgresql_server, guard, before.token):
        statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        for _ in range(3):  # while the machine stands still, the patience for the fence may end
            waiting = asyncio.create_task(backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)]))
            while not waiting.done() and not await postgresql_server.value(statement):
                pass
            assert [outcome.name for outcome in await backend.renew([other])] == ["RENEWED"]
            overtaken = not waiting.done()
            with pytest.raises(BackendUnavailableError, match="another transaction keeps"):
                await waiting
            if overtaken:
                break
        assert overtaken, "the renewal waited for the fence"
        assert await backend.inspect(SEAT) is None
    assert (await granted(backend, [(guard, SEAT)])).token > before.token


async def test_an_attempt_that_is_given_up_leaves_a_connection_that_works(backend, guard, postgresql_server):
    before = await granted(backend, [(guard, SEAT)])
    await postgresql_server.execute("UPDATE fencing.fencing_lock SET expires_at = now() WHERE name = 'seats/42'")
    async with writing(postgresql_server, guard, before.token):
        waiting = asyncio.create_task(backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert isinstance(await backend.acquire_fenced(Claim("another", 60.0), [(guard, "a0a0a0a0")]), Grant)


async def test_a_holder_of_a_lock_has_its_fence_from_the_start(guard, postgresql_server):
    events = []
    async with connect(postgresql_server.url, observers=[events.append]) as locks:
        aside = MemoryGuard()
        async with locks.lock(SEAT, fences=[aside, guard]) as lease:
            assert await guard.highest(SEAT) == await aside.highest(SEAT) == lease.token
            async with postgresql_server.connected() as connection, connection.transaction():
                with pytest.raises(StaleTokenError):
                    await guard.admit(connection, SEAT, Token(lease.token - 1, "b0b0b0b0"))
            waiting = asyncio.create_task(locks.lock(SEAT, fences=[guard], wait=0.5).acquire())
            with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                await waiting
            assert await guard.highest(SEAT) == lease.token
    assert [event.resource for event in events if isinstance(event, FenceRaised)] == [SEAT, SEAT]


async def test_waiters_with_fences_are_served_in_order(guard, postgresql_server):
    order: list[int] = []

    async def wait(locks, number):
        async with locks.lock(SEAT, fences=[guard], wait=20) as lease:
            order.append(number)
            assert await guard.highest(SEAT) == lease.token

    async with connect(postgresql_server.url) as locks:
        async with locks.lock(SEAT, fences=[guard]):
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(wait(locks, number)))
                statement = "SELECT count(*) FROM fencing.fencing_waiter"
                while await postgresql_server.value(statement) <= number:
                    assert not tasks[-1].done()
        await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_after_its_connection_was_ended_the_next_attempt_opens_another(backend, guard, postgresql_server):
    await granted(backend, [(guard, SEAT)])
    await postgresql_server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    claim, answer = Claim("after", 60.0), None
    for _ in range(3):
        with contextlib.suppress(BackendUnavailableError):
            answer = await backend.acquire_fenced(claim, [(guard, "after")])
    assert isinstance(answer, Grant)
    assert await guard.highest("after") == answer.token


async def test_a_role_that_may_not_touch_the_fences_is_refused_and_gets_no_grant(guard, postgresql_server):
    await guard.raise_to("any", Token(1, "a0a0a0a0"))  # the table is there, and the superuser's
    name = postgresql_server.database
    await postgresql_server.execute(f'CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE "{name}" TO app')
    url = postgresql_server.url_as("app")
    backend = PostgresqlBackend(url)
    try:
        with pytest.raises(BackendRefusedError, match="SELECT, INSERT and UPDATE on fencing_fence"):
            await backend.acquire_fenced(Claim(SEAT, 60.0), [(SqlGuard(url), SEAT)])
        assert await backend.inspect(SEAT) is None
    finally:
        await backend.aclose()


async def test_a_missing_schema_of_the_guard_is_named_and_not_blamed_on_the_locks(postgresql_server):
    guard = SqlGuard(postgresql_server.url, table="app.fencing_fence")
    async with connect(postgresql_server.url) as locks:
        with pytest.raises(BackendRefusedError) as refused:
            await locks.lock(SEAT, fences=[guard]).acquire()
    message = str(refused.value)
    assert "app.fencing_fence" in message
    assert 'CREATE SCHEMA "app"' in message
    assert SEAT in message
    assert "those of this version" not in message


async def test_a_missing_table_of_the_guard_is_named_and_not_blamed_on_the_locks(backend, postgresql_server):
    guard = SqlGuard(postgresql_server.url, table="public.seats_fence", create=False)
    with pytest.raises(BackendRefusedError, match=r"public\.seats_fence.*ddl\('postgresql'\)"):
        await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)])
    assert await backend.inspect(SEAT) is None
    assert isinstance(await backend.acquire(Claim(SEAT, 60.0)), Grant)


async def test_permits_and_readers_raise_their_fences_after_the_grant(backend, guard):
    """The number of a permit is known only then, and the statement that grants with the fence knows locks alone."""
    async with connect(backend) as locks:
        async with locks.semaphore("pool", permits=2, fences=[guard]) as one:
            two = await locks.semaphore("pool", permits=2, fences=[guard]).acquire(wait=5)
            assert [await guard.highest(f"pool/{number}") for number in (0, 1)] == [one.token, two.token]
            assert {holder.mode.word for holder in await backend.holders("pool")} == {"permit"}
            await two.release()
        catalog = locks.rwlock("catalog", fences=[guard])
        async with catalog.reader as reader:
            other = await catalog.reader.try_acquire()
            assert other is not None
            fence = await guard.highest("catalog")
            assert (fence, fence.holder) == (reader.token, reader.token.holder)
            await other.release()
        async with catalog.writer as writer:
            assert await guard.highest("catalog") == writer.token
