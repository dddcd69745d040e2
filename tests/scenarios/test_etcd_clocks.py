"""Members of etcd whose clocks are wrong: the wall clock, which must not matter, and the monotonic one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from campaigns import amount
from etcd_clock import ClockError, ForeignClock
from etcd_server import EtcdCluster, EtcdMember, StartEtcd, gone
from etcd_stage import SHORT_IN_LINE, backend_on, count_of_keys, granted, held_for, keys
from event_log import CLOCK, ENDED_BY_TIME
from fault_proxy import FaultProxy
from stays import Stay, opened, staying

from fencing_sdk import LossReason, StaleTokenError
from fencing_sdk.abc import Claim
from fencing_sdk.guards.etcd import EtcdGuard, put

pytest_plugins = ["etcd_fixtures"]

HOUR = 3600.0


@contextmanager
def clock_of(member: EtcdMember) -> Iterator[ForeignClock]:
    """The clocks of a member, which is not used any more when they have been wrong."""
    try:
        clock = ForeignClock(member.pid)
    except ClockError as error:
        pytest.skip(str(error))
    try:
        yield clock
    finally:
        clock.close()
        member.kill()


@pytest.mark.campaign
async def test_a_leader_whose_wall_clock_is_set_ends_no_grant_before_its_time(etcd_cluster: EtcdCluster):
    """Back and forward, while a lock is held and another was left by its holder. Set back, 3.4 frees that later."""
    url = etcd_cluster.url
    async with opened(url) as (locks, log), opened(url) as (others, _), backend_on(url) as leaving:
        with clock_of(await etcd_cluster.await_leader()) as clock:
            async with staying(locks.lock("a", ttl=10, heartbeat_interval=0.5)) as stay:
                for wall in amount((-1.5, HOUR), short=(HOUR,)):
                    left_at = CLOCK.now()
                    token = await granted(leaving, Claim("left", 4.0))
                    clock.set(wall=wall)
                    await held_for(0.5, log, others, "a")
                    seen = await leaving.inspect("left")
                    assert seen is not None
                    assert seen.token == token
                    async with others.lock("left", wait=20) as lease:
                        assert lease.token > token
                        assert CLOCK.now() >= left_at + 4.0
                await stay.end()
    await gone(etcd_cluster, "fencing/")


async def test_a_lock_whose_lease_is_overdue_is_seen_as_held_until_its_key_goes(start_etcd: StartEtcd):
    """3.4 waits for its wall clock too, and says meanwhile that less than nothing is left."""
    server = start_etcd()
    async with backend_on(server.url) as backend:
        with clock_of(server.members[0]) as clock:
            token = await granted(backend, Claim("a", 1.0))
            clock.set(wall=-HOUR, leap=10.0)
            seen = await backend.inspect("a")
            if await keys(server, "a"):
                assert seen is not None
                assert seen.token == token
                assert seen.remaining > 0


async def test_an_etcd_whose_clock_runs_a_fifth_fast_hands_on_after_the_work_has_ended(start_etcd: StartEtcd):
    """The holder hears nothing any more; its safety buffer is what the difference is taken from."""
    server = start_etcd()
    async with FaultProxy(server.members[0].port) as network:
        clients = opened(f"etcd://127.0.0.1:{network.port}"), opened(server.url)
        async with clients[0] as (locks, _), clients[1] as (others, _):
            with clock_of(server.members[0]) as clock:
                clock.set(rate=1.2)
                async with staying(locks.lock("a", **SHORT_IN_LINE)) as stay:
                    waiting = Stay(others.lock("a", ttl=10))
                    await count_of_keys(server, "a", 2)
                    network.blackhole()
                    await stay.over()
                    assert stay.lost in ENDED_BY_TIME
                    await waiting.begun()
                    assert stay.body_ended_at < waiting.granted_at
                    assert waiting.token > stay.token
                    await waiting.end()
                    network.cut()
                    network.heal()


async def test_a_leader_whose_clock_leaps_ends_grants_early_and_the_guard_refuses_their_holders(start_etcd: StartEtcd):
    """
    No lease can be kept by a clock that leaps: what is left is the token, and a notice of the loss.

    The leader is alone. One of three may lead no more when it goes on after its clock was set.
    """
    server = start_etcd()
    url = server.url
    async with opened(url) as (locks, _), opened(url) as (others, _), EtcdGuard(url) as guard:
        with clock_of(server.members[0]) as clock:
            async with staying(locks.lock("a", ttl=600)) as stay:
                await guard.execute("a", stay.token, put("data/a", "old"))
                waiting = Stay(others.lock("a", ttl=600, fences=[guard]))
                await count_of_keys(server, "a", 2)
                clock.set(wall=HOUR, leap=HOUR)  # up to 3.4, etcd looks at both
                await stay.over()
                assert stay.lost is LossReason.REVOKED
                await waiting.begun()
                assert waiting.token > stay.token
                with pytest.raises(StaleTokenError):
                    await guard.execute("a", stay.token, put("data/a", "late"))
                await waiting.end()


@pytest.mark.campaign
async def test_followers_whose_clocks_are_off_cost_nothing_also_when_one_of_them_leads(etcd_cluster: EtcdCluster):
    """A new leader counts every lease from its election on: prolonged, never cut."""
    leader = await etcd_cluster.await_leader()
    one, other = (member for member in etcd_cluster.members if member is not leader)
    async with opened(etcd_cluster.url) as (locks, log), opened(etcd_cluster.url) as (others, _):
        with clock_of(one) as ahead, clock_of(other) as behind:
            ahead.set(wall=HOUR, leap=HOUR)  # before the lease is taken: one of them may lead from now on
            behind.set(wall=-HOUR, rate=0.9)
            async with staying(
                locks.lock("a", **amount({"ttl": 6.0}, short={"ttl": 20.0, "heartbeat_interval": 0.5}))
            ) as stay:
                await held_for(1, log, others, "a")
                leader.kill()
                await held_for(amount(7.5, short=2.0), log, others, "a")
                await stay.end()
