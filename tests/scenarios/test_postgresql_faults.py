"""PostgreSQL, or the network before it, falls silent or breaks under a holder: no overrun, nothing left behind."""

import asyncio

import pytest
from event_log import CLOCK, ENDED_BY_TIME
from patience import until
from postgresql_stage import ENDS, LEAVING, LEFT, LONG, SHORT, nothing_left, sessions, terminate, waiting
from stays import PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import (
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    Lost,
    NotAcquired,
    RenewalFailed,
    Renewed,
)
from fencing_sdk._lease import state_of
from fencing_sdk.backends.postgresql import from_url
from fencing_sdk.backends.postgresql.connection import dial

pytest_plugins = ["postgresql_fixtures"]


def forget(proxy):
    """Lose the state of the connections that are open, as a NAT gateway may: they never carry a byte again."""
    links = list(proxy._links)
    for link in links:
        link.up._held = link.down._held = lambda: True
    return links


# The server is silent.


@pytest.mark.every_loop
async def test_a_server_that_stops_for_less_than_the_deadline_is_ridden_out(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        renewed = len(log.of(Renewed))
        postgresql_server.pause()
        await log.seen(RenewalFailed, 2)
        postgresql_server.resume()
        await log.seen(Renewed, renewed + 2)
        assert stay.lease.held
        assert stay.lease.token == stay.token
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


@pytest.mark.every_loop
async def test_a_server_that_stops_for_longer_ends_the_body_before_the_lease(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await log.seen(Renewed)
        ends_at = await postgresql_server.value(ENDS, "a")
        postgresql_server.pause()
        await stay.over()
        postgresql_server.resume()
        assert stay.lost in ENDED_BY_TIME
        assert stay.body_ended_micros < ends_at
        assert stay.left_at - stay.body_ended_at < LEAVING
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(postgresql_server)


@pytest.mark.parametrize("fault", ["blackhole", "half_open"])
async def test_the_server_still_keeps_the_lease_at_the_moment_the_body_ends(fault, postgresql_server, postgresql_proxy):
    ended: list[tuple[float, float]] = []

    async def work(locks) -> float:
        with pytest.raises(LeaseLostError):
            async with locks.lock("a", **SHORT):
                try:
                    await asyncio.Event().wait()
                finally:
                    ((left,),) = postgresql_server.ask(LEFT, "a")  # blocks: this very moment is what counts
                    ended.append((left, CLOCK.now()))
        return CLOCK.now()

    async with opened(postgresql_proxy.url) as (locks, log):
        task = asyncio.create_task(work(locks))
        await log.seen(Renewed, 2)
        getattr(postgresql_proxy, fault)()
        async with asyncio.timeout(PATIENCE):
            left_at = await task  # while nothing is delivered
        postgresql_proxy.heal()
        assert log.of(Lost)[0].reason in ENDED_BY_TIME
    ((left, ended_at),) = ended
    assert left > 0
    assert left_at - ended_at < LEAVING
    await nothing_left(postgresql_server)


async def test_a_connection_that_died_in_silence_is_replaced_within_the_deadline(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 4.0})) as stay:
        await log.seen(Renewed)
        forgotten = forget(postgresql_proxy)
        renewed = len(log.of(Renewed))
        await log.seen(RenewalFailed)
        await log.seen(Renewed, renewed + 2)
        assert stay.lease.held
        await stay.end()
        for link in forgotten:
            link.cut()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_a_connection_that_dies_in_silence_while_it_is_opened_costs_no_lease(postgresql_server, postgresql_proxy):
    options = {"ttl": 5.0, "safety_buffer": 0.5, "heartbeat_interval": 0.3}
    async with opened(postgresql_proxy.url) as (locks, log), staying(locks.lock("a", **options)) as stay:
        await log.seen(Renewed)
        accepted = postgresql_proxy.accepted
        postgresql_proxy.blackhole()
        await until(lambda: postgresql_proxy.accepted > accepted)
        forgotten = forget(postgresql_proxy)
        postgresql_proxy.heal()
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 2)
        await stay.end()
        for link in forgotten:
            link.cut()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_a_client_that_closes_while_nothing_is_delivered_closes_all_the_same(postgresql_server, postgresql_proxy):
    async with opened(postgresql_server.url) as (others, _):
        held = await others.lock("b", ttl=60).acquire()
        async with opened(postgresql_proxy.url) as (locks, log):
            lease = await locks.lock("a", **LONG).acquire()
            stay = Stay(locks.lock("b", ttl=60))
            await waiting(postgresql_server, 1, "b")
            await log.seen(Renewed)
            postgresql_proxy.blackhole()
            begun = CLOCK.now()
        assert CLOCK.now() - begun < 15
        assert lease.lost_reason is LossReason.CLOSED
        await stay.over()
        postgresql_proxy.cut()
        postgresql_proxy.heal()
        async with staying(others.lock("a", wait=PATIENCE)) as following:
            assert following.token > state_of(lease).number
            await following.end()
        await lease.release()
        await held.release()
        async with others.lock("b", wait=PATIENCE):  # its waiter could not say that it left
            pass
    await nothing_left(postgresql_server)


async def test_a_grant_that_comes_after_it_was_given_up_is_undone(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log):
        postgresql_server.pause()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=30, wait=0.2).acquire()
        await log.seen(NotAcquired)
        resumed_at = CLOCK.now()
        postgresql_server.resume()
        async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:
            assert stay.granted_at - resumed_at < 15  # long before the ttl of the late grant
            await stay.end()
    await nothing_left(postgresql_server)


async def test_a_late_grant_on_a_held_back_connection_is_undone(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, log):
        postgresql_proxy.blackhole()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=30, wait=0.2).acquire()
        await log.seen(NotAcquired)
        postgresql_proxy.heal()
        async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:
            await stay.end()
    await nothing_left(postgresql_server)


# The connection breaks.


@pytest.mark.every_loop
async def test_a_connection_terminated_again_and_again_costs_nothing_and_leaves_one(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(4):
            renewed = len(log.of(Renewed))
            assert await terminate(postgresql_server) == 1
            await log.seen(Renewed, renewed + 1)
        assert len(await sessions(postgresql_server)) == 1
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_a_server_that_refuses_connections_for_a_while_costs_nothing(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        postgresql_proxy.refuse()
        postgresql_proxy.cut()
        await log.seen(RenewalFailed, 3)
        renewed = len(log.of(Renewed))
        postgresql_proxy.heal()
        await log.seen(Renewed, renewed + 2)
        assert postgresql_proxy.connections == 1
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_a_server_that_refuses_connections_for_good_ends_the_body_in_time(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await log.seen(Renewed)
        postgresql_proxy.refuse()
        postgresql_proxy.cut()
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        assert stay.left_at - stay.body_ended_at < LEAVING
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", wait=0.1).acquire()
        postgresql_proxy.heal()
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(postgresql_server)


async def test_many_tasks_share_one_connection_after_it_broke_under_all_of_them(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, _):

        async def use(number: int) -> None:
            for _ in range(4):
                async with locks.lock(f"n{number}", ttl=60, wait=60):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(number)) for number in range(50)]
        pause = 0.5
        while not all(task.done() for task in tasks):
            postgresql_proxy.cut()
            await asyncio.wait(tasks, timeout=pause)
            pause *= 1.3  # a slow machine gets somewhere, too
        await asyncio.gather(*tasks)
        assert postgresql_proxy.connections <= 1

        async def single() -> bool:
            return len(await sessions(postgresql_server)) <= 1

        await eventually(single, what="one connection is left")
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
