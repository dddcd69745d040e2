"""Many wait for one lock or share in PostgreSQL: all are served, in order, readers of one client together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest
from inside import LONGEST_PAUSE
from patience import until
from postgresql_server import PostgresqlServer
from postgresql_stage import idle_in_transaction, line, nothing_left, terminate, waiting
from shares_suite import NAME, claim_of, granted, served
from stays import PATIENCE, Stay, eventually, opened, staying, use_in_turn

from fencing_sdk import BackendUnavailableError
from fencing_sdk.abc import READER, WRITER, Busy, Claim, Grant
from fencing_sdk.backends.postgresql import PostgresqlBackend, from_url, schema, waiters
from fencing_sdk.testing.promises.under_test import StandingClaim, in_line

pytest_plugins = ["postgresql_fixtures"]


# Many wait for one lock; some are killed, wake-ups are lost: all others are served, in order, one by one.


# Processes.


# One process.


@pytest.fixture
def no_polling(monkeypatch):
    """No waiter tries again for a minute unless it is woken, and none is removed from the line because of that."""
    monkeypatch.setattr("fencing_sdk.backends.postgresql.waiters.LINE_POLL", 240.0)
    monkeypatch.setattr("fencing_sdk.backends.postgresql.waiters.ECHO_PATIENCE", PATIENCE)
    monkeypatch.setattr(LONGEST_PAUSE, 60.0)
    text = schema._TEXT
    for found in ("v_now) + 3 FROM", "p_now - interval '3 seconds'", "p_now + interval '3 seconds'"):
        assert text.count(found) == 1
        text = text.replace(found, found.replace("3", "240"))
    monkeypatch.setattr(schema, "_TEXT", text)


async def test_a_waiter_that_missed_a_message_tries_when_its_client_listens_again(
    postgresql_server, postgresql_proxy, no_polling
):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(server, 1)
            await until(lambda: locks._backend._waiters.listener.listening)
            await locks.inspect("other")  # now the try that was made while listening is answered
            proxy.refuse()
            proxy.cut()
            await until(lambda: not locks._backend._waiters.listener.listening)
            await stay.end()
        proxy.heal()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(server)


async def test_a_head_that_leaves_while_it_is_its_turn_wakes_the_next(postgresql_server, postgresql_proxy, no_polling):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            first = Stay(locks.lock("a", ttl=60))
            await waiting(server, 1)
            await first.abandon()
            await waiting(server, 0)  # now the statement to leave is prepared
            head = Stay(locks.lock("a", ttl=60))
            await waiting(server, 1)
            following = Stay(others.lock("a", ttl=60), work=0)
            await waiting(server, 2)
            await until(
                lambda: locks._backend._waiters.listener.listening and others._backend._waiters.listener.listening
            )
            await locks.inspect("other")  # now the tries that were made while listening are answered
            await others.inspect("other")
            proxy.half_open()  # the head is not reached by the message, but can say that it leaves
            await stay.end()
            await head.abandon()
            await following.over()
            assert following.error is None
        proxy.heal()
    await nothing_left(server)


async def test_a_line_that_was_emptied_forms_again(postgresql_server):
    """As by a crash of the server, or by a standby that takes over: the line is in a table that is not logged."""
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0.01) for _ in range(10)]
            await waiting(server, 10)
            await server.execute("TRUNCATE fencing.fencing_waiter")
            await waiting(server, 10)
            await stay.end()
        for waiter in stays:
            await waiter.over()
            assert waiter.error is None
    await nothing_left(server)


async def test_grants_never_overlap_while_sessions_are_terminated_all_the_time(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (one, _), opened(server.url) as (two, _), opened(server.url) as (three, _):
        using = asyncio.create_task(use_in_turn([one, two, three], tasks=4, times=3))
        pause = 0.4
        while not using.done():
            await terminate(server)
            await asyncio.wait([using], timeout=pause)
            pause *= 1.1  # a slow machine gets somewhere, too
        await using
    await nothing_left(server)


# Readers in PostgreSQL, beside what every store does: those of one client are decided together, by one statement.


@pytest.fixture
async def backend(postgresql_server: PostgresqlServer) -> AsyncIterator[PostgresqlBackend]:
    async with aclosing(from_url(postgresql_server.url)) as made:
        yield made


@pytest.fixture
async def rival(postgresql_server: PostgresqlServer) -> AsyncIterator[PostgresqlBackend]:
    async with aclosing(from_url(postgresql_server.url)) as made:
        yield made


async def join(stack: AsyncExitStack, backend: PostgresqlBackend, claims: list[Claim]) -> list[StandingClaim]:
    return [await stack.enter_async_context(in_line(backend, claim)) for claim in claims]


async def test_a_few_statements_let_in_all_readers_of_a_client(
    backend: PostgresqlBackend, rival: PostgresqlBackend, monkeypatch: pytest.MonkeyPatch
):
    """Three times as many as are woken at once; and no waiter tries on its own."""
    monkeypatch.setattr(waiters, "LINE_POLL", 240.0)
    monkeypatch.setattr("fencing_sdk.backends.postgresql.waiters.ECHO_PATIENCE", PATIENCE)
    writer, claims, asked = claim_of(WRITER), [claim_of(READER) for _ in range(192)], []
    await granted(rival, writer)
    run = backend._connection.run
    async with AsyncExitStack() as places:
        turns = await join(places, backend, claims)
        await until(lambda: backend._waiters.listener.listening, what="the client listens")
        monkeypatch.setattr(
            backend._connection, "run", lambda *args, **options: asked.append(args) or run(*args, **options)
        )
        entering = [asyncio.create_task(served(backend, *each)) for each in zip(claims, turns, strict=True)]
        await until(lambda: asked, what="they try")
        await asyncio.wait(entering, timeout=0.1)
        asked.clear()
        await rival.release(writer)
        grants = await asyncio.gather(*entering)
        assert len(asked) <= 20
    assert len({grant.token for grant in grants}) == 1
    await asyncio.gather(*map(backend.release, claims))


async def test_readers_whose_places_are_gone_join_again_when_they_try_together(
    postgresql_server: PostgresqlServer, backend: PostgresqlBackend, rival: PostgresqlBackend
):
    """A try of the others is their sign of life."""
    server, writer, claims = postgresql_server, claim_of(WRITER), [claim_of(READER) for _ in range(6)]
    lost = "DELETE FROM fencing.fencing_waiter WHERE owner = ANY ($1) RETURNING owner"
    await granted(rival, writer)
    async with AsyncExitStack() as places:
        turns, gone = await join(places, backend, claims), [claim.owner for claim in claims[:3]]
        await server.value(lost, gone)
        await server.execute("UPDATE fencing.fencing_waiter SET seen = clock_timestamp() - interval '2 seconds'")
        for outcome in await asyncio.gather(*map(backend.acquire, claims)):
            assert isinstance(outcome, Busy)
        assert await line(server, NAME) == 6
        assert (
            await server.value("SELECT extract(epoch FROM clock_timestamp() - min(seen)) FROM fencing.fencing_waiter")
            < 2
        )
        await server.value(lost, gone)
        await rival.release(writer)
        grants = await asyncio.gather(*(served(backend, *each) for each in zip(claims, turns, strict=True)))
        assert len({grant.token for grant in grants}) == 1
    for claim in claims:
        await backend.release(claim)


async def test_readers_of_a_row_that_is_locked_do_not_fail_those_of_another_name(
    postgresql_server: PostgresqlServer, backend: PostgresqlBackend, rival: PostgresqlBackend
):
    writers, claims = [
        [Claim(name, 60.0, mode=mode) for name in "ab" for _ in range(number)]
        for mode, number in ((WRITER, 1), (READER, 2))
    ]
    for writer in writers:
        await granted(rival, writer)
    async with AsyncExitStack() as places:
        await join(places, backend, claims)
        for writer in writers:
            await rival.release(writer)
        locked = "SELECT FROM fencing.fencing_lock WHERE name = 'a' FOR UPDATE"
        async with idle_in_transaction(postgresql_server, locked):
            outcomes = await asyncio.gather(*map(backend.acquire, claims), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [BackendUnavailableError] * 2 + [Grant] * 2
        assert [type(await backend.acquire(claim)) for claim in claims] == [Grant] * 4
    for claim in claims:
        await backend.release(claim)


async def test_readers_wait_for_a_writer_that_came_between_their_look_and_their_turn(
    postgresql_server: PostgresqlServer, backend: PostgresqlBackend, rival: PostgresqlBackend
):
    """They look without locking the row at first, and wait for it then."""
    before, claims = claim_of(WRITER), [claim_of(READER) for _ in range(3)]
    await granted(rival, before)
    async with AsyncExitStack() as places:
        await join(places, backend, claims)
        await rival.release(before)
        signature = "fencing_readers(text, text[], text[], text[], boolean)"
        await postgresql_server.execute(f"ALTER FUNCTION fencing.{signature} SET lock_timeout = '30s'")
        taken = "UPDATE fencing.fencing_lock SET owner = 'other', expires_at = clock_timestamp() + interval '1 minute'"
        async with postgresql_server.connected() as session, postgresql_server.connected() as observer:
            transaction = session.transaction()
            await transaction.start()
            await session.execute(taken)
            trying = asyncio.gather(*map(backend.acquire, claims))
            blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            await eventually(lambda: observer.fetchval(blocked), what="they wait for the row")
            await transaction.commit()
            assert [type(outcome) for outcome in await trying] == [Busy] * 3
            assert await observer.fetchval("SELECT count(*) FROM fencing.fencing_share") == 0
            await session.execute("UPDATE fencing.fencing_lock SET owner = NULL, expires_at = clock_timestamp()")
