"""The server stops at once or loses its memory, and starts again: what was granted stays granted, tokens grow."""

import asyncio

import pytest
from patience import until
from postgresql_server import FORGETFUL
from postgresql_stage import ENDS, line, nothing_left, sessions, terminate, waiting
from stays import LONG, PATIENCE, SHORT, Stay, eventually, opened, renewed_or_over, staying

from fencing_sdk import BackendUnavailableError, Lost, RenewalFailed, Renewed
from fencing_sdk._lease import state_of
from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.backends.postgresql import from_url

pytest_plugins = ["postgresql_fixtures"]


def crash(server, how: str) -> None:
    """Stop and start again."""
    if how == "kill":
        server.kill()
        server.start()
    else:
        server.restart(immediate=True)


@pytest.mark.parametrize(("how", "tokens"), [("immediate", "counter"), ("kill", "counter"), ("kill", "hybrid")])
async def test_tokens_grow_over_every_crash(how, tokens, start_postgresql):
    server = start_postgresql(**FORGETFUL)
    seen = []
    async with opened(server.url, tokens=tokens) as (locks, _):
        for _ in range(3):
            lease = await locks.lock("a", ttl=30, wait=PATIENCE).acquire()
            seen.append(state_of(lease).number)
            await asyncio.to_thread(crash, server, how)
            await lease.release()
    assert seen == sorted(set(seen))
    if tokens == "counter":
        assert seen == [1, 2, 3]


async def test_what_was_granted_and_renewed_before_a_crash_is_kept_after_it(start_postgresql):
    """Otherwise the server would grant the lock to another owner while the holder still relies on its answer."""
    server = start_postgresql(**FORGETFUL)
    backend = from_url(server.url)
    claim = Claim("a", 60.0)
    granted = await backend.acquire(claim)
    for _ in range(2):
        ends = await server.value(ENDS, "a")
        await asyncio.to_thread(crash, server, "kill")
        assert await server.value(ENDS, "a") == ends
        assert await eventually(lambda: renewed(backend, claim), what="it is renewed")
    assert (await backend.inspect("a")).token == granted.token
    await backend.release(claim)
    await backend.aclose()
    await nothing_left(server)


async def renewed(backend, claim) -> bool:
    try:
        return await backend.renew([claim]) == [Renewal.RENEWED]
    except BackendUnavailableError:
        return False


@pytest.mark.parametrize("how", ["immediate", "kill"])
async def test_a_lease_and_those_who_wait_live_through_a_crash(how, start_postgresql):
    server = start_postgresql()
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=20, heartbeat_interval=0.5)) as stay:
            waiters = [Stay(others.lock("a", ttl=20, wait=PATIENCE), work=0) for _ in range(3)]
            await waiting(server, 3)
            await asyncio.to_thread(crash, server, how)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            await eventually(lambda: _in_line(server, 3), what="all three wait again")
            assert not any(waiter.entered.is_set() for waiter in waiters)
            await stay.end()
        for waiter in waiters:
            await waiter.over()
            assert waiter.error is None
            assert waiter.token > stay.token
    assert log.of(Lost) == []
    await nothing_left(server)


async def _in_line(server, number) -> bool:
    return await line(server) == number


async def test_a_restart_for_longer_than_the_lease_ends_the_body_in_time(start_postgresql):
    server = start_postgresql()
    async with opened(server.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        await asyncio.to_thread(server.stop, immediate=True)
        await stay.over()
        assert stay.lost is not None
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", wait=0.2).acquire()
        await asyncio.to_thread(server.start)
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(server)


async def test_a_server_that_starts_up_is_waited_for(start_postgresql):
    """57P03, the database system is starting up: no reason to give up."""
    server = start_postgresql()
    async with opened(server.url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=0.2)) as stay:
        await log.seen(Renewed)
        await asyncio.to_thread(server.stop)
        await log.seen(RenewalFailed, 2)
        await asyncio.to_thread(server.start)
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(server)


async def test_a_server_that_is_down_when_the_client_opens_is_told_at_once(start_postgresql):
    server = start_postgresql()
    server.stop()
    with pytest.raises(BackendUnavailableError):
        async with opened(server.url):
            pytest.fail("it opened")
    server.start()
    async with opened(server.url) as (locks, _), locks.lock("a"):
        pass
    await nothing_left(server)


# One session ends.


@pytest.mark.parametrize("which", ["query ILIKE 'listen%'", "query NOT ILIKE 'listen%'", "true"])
async def test_a_terminated_session_costs_waiters_a_moment(which, postgresql_server, monkeypatch):
    listener = "fencing_sdk.backends.postgresql.connection.listener"
    monkeypatch.setattr(f"{listener}.ECHO_PATIENCE", PATIENCE)  # on a slow machine an echo takes long
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, log):
        async with staying(others.lock("a", **LONG | {"ttl": 20})) as stay:
            waiters = [Stay(locks.lock("a", ttl=60), work=0) for _ in range(10)]
            await waiting(server, 10)
            await until(lambda: locks._backend._waiters.listening)
            assert await terminate(server, which) > 0
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
        assert log.of(Lost) == []

        async def few() -> bool:
            return len(await sessions(server)) <= 3

        await eventually(few, what="no session is left over")
    await nothing_left(server)
