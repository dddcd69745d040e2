"""What a failover loses, and what the SDK makes of it: replication really cut, a standby really promoted."""

import asyncio

import pytest
from postgresql_replicas import Replicated
from postgresql_stage import waiting
from stays import LONG, PATIENCE, SHORT, Stay, answered, opened, renewed_or_over, staying

from fencing_sdk import BackendUnavailableError, Lost, RenewalFailed, Renewed, StaleTokenError
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["postgresql_fixtures"]

COMMIT = "COMMENT ON SCHEMA public IS 'something to commit'"


async def grants_around_a_failover(group: Replicated, tokens: str) -> tuple[int, int]:
    """The token of a grant that the standby never received, and of the next one, by that standby."""
    async with opened(group.primary.url, tokens=tokens) as (before, _):
        for _ in range(3):
            async with before.lock("a", wait=PATIENCE):
                pass
        await group.synced()
        group.cut_replication()
        first = await before.lock("a", ttl=60).acquire()
        token = first.token
        promoted = await group.promote()
        async with opened(promoted.url, tokens=tokens) as (after, _):
            second = await after.lock("a", wait=PATIENCE).acquire()  # the new primary knows nothing of the first lease
            return token, second.token


async def test_a_failover_that_loses_a_grant_does_not_lose_its_token(postgresql_group):
    first, second = await grants_around_a_failover(postgresql_group, "hybrid")
    assert first < second
    guard = MemoryGuard()
    await guard.raise_to("a", second)
    with pytest.raises(StaleTokenError):
        guard.admit("a", first)


async def test_a_plain_counter_repeats_a_token_after_such_a_failover(postgresql_group):
    """The stated risk of ``tokens="counter"``, and why a guard compares holders too."""
    first, second = await grants_around_a_failover(postgresql_group, "counter")
    assert first == second
    guard = MemoryGuard()
    await guard.raise_to("a", first)
    with pytest.raises(StaleTokenError) as refused:
        guard.admit("a", second)
    assert refused.value.conflict


async def have_commits_wait_for_the_standby(group: Replicated) -> None:
    """Return when they do: a server that was told to read its settings does so when it gets round to it."""
    await group.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    await group.primary.execute("SELECT pg_reload_conf()")
    group.cut_replication()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    writing = asyncio.create_task(group.primary.execute(COMMIT))
    for _ in range(1000):
        if not writing.done() and await group.primary.value(waiting):
            break
        if writing.done():
            await writing
            writing = asyncio.create_task(group.primary.execute(COMMIT))
        await asyncio.sleep(0.05)
    else:
        pytest.fail("no commit waits for the standby")
    group.link.heal()
    await writing


async def test_a_grant_that_a_synchronous_standby_has_survives_the_failover(postgresql_group):
    group = postgresql_group
    await have_commits_wait_for_the_standby(group)
    async with opened(group.primary.url) as (before, _):
        lease = await before.lock("a", ttl=60).acquire()
        token, holder = lease.token, lease.holder
        group.primary.kill()
        promoted = await group.promote()
        await promoted.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await promoted.execute("SELECT pg_reload_conf()")
        async with opened(promoted.url) as (after, _):
            assert await answered(after.lock("a").try_acquire) is None
            found = await answered(lambda: after.inspect("a"))
            assert (found.token, found.holder) == (token, holder)


async def test_a_grant_that_a_synchronous_standby_does_not_confirm_is_not_reported(postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _):
        async with locks.lock("a"):
            pass
        await have_commits_wait_for_the_standby(group)
        async with locks.lock("b", wait=PATIENCE):
            pass
        group.cut_replication()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=60, wait=1).acquire()
        group.link.heal()
        async with locks.lock("a", ttl=60, wait=PATIENCE):  # what was granted in silence is undone
            pass


async def test_a_standby_is_refused_until_it_is_promoted(postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _), locks.lock("a"):
        pass
    await group.synced()
    with pytest.raises(BackendUnavailableError, match="standby"):
        async with opened(group.standby.url) as (locks, _):
            await locks.lock("a", wait=0.5).acquire()
    await group.promote()
    async with opened(group.standby.url) as (locks, _), locks.lock("a", wait=PATIENCE):
        pass


@pytest.mark.parametrize("order", ["primary first", "standby first"])
async def test_of_two_hosts_the_primary_is_found(order, postgresql_group):
    group = postgresql_group
    url = group.url if order == "primary first" else swapped(group)
    async with opened(url) as (locks, _):
        for _ in range(3):
            async with locks.lock("a", wait=PATIENCE):
                pass
    assert await group.primary.value("SELECT count(*) FROM fencing.fencing_lock") == 1


def swapped(group: Replicated) -> str:
    first, second = f"127.0.0.1:{group.primary.port}", f"127.0.0.1:{group.standby.port}"
    return group.url.replace(f"{first},{second}", f"{second},{first}")


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_client_of_two_hosts_follows_a_failover_with_its_lease(how, postgresql_group):
    """The lease that was replicated goes on with its token, over a dead or silent primary and a new one."""
    group = postgresql_group
    async with opened(group.url) as (locks, log):
        async with staying(locks.lock("a", ttl=40, heartbeat_interval=0.5)) as stay:
            await log.seen(Renewed)
            await group.synced()
            getattr(group.primary, how)()
            promoted = await group.promote()
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 2)
            found = await answered(lambda: locks.inspect("a"))
            assert (found.token, found.holder) == (stay.token, stay.lease.holder)
            assert await promoted.value("SELECT token FROM fencing.fencing_lock WHERE name = 'a'") == stay.token
            await stay.end()
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > stay.token
    assert log.of(Lost) == []


async def test_waiters_get_their_turn_over_a_failover(postgresql_group):
    """The line and the connection to listen on are gone with the old primary; the waiters are not."""
    group = postgresql_group
    async with opened(group.url) as (locks, _), opened(group.url) as (others, _):
        async with staying(locks.lock("a", ttl=40, heartbeat_interval=0.5)) as stay:
            waiters = [Stay(others.lock("a", ttl=30), work=0) for _ in range(3)]
            await waiting(group.primary, 3)
            await group.synced()
            group.primary.kill()
            promoted = await group.promote()
            await waiting(promoted, 3)
            await stay.end()
        for waiter in waiters:
            await waiter.over()
            assert waiter.error is None
            assert waiter.token > stay.token


async def test_a_primary_that_becomes_a_standby_is_left_for_the_other(postgresql_group):
    """A switch-over: both answer all the time, and who may be written to has changed."""
    group = postgresql_group
    async with opened(group.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 40})) as stay:
        await log.seen(Renewed)
        await group.synced()
        await group.primary.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await group.primary.execute("SELECT pg_reload_conf()")
        await log.seen(RenewalFailed)
        promoted = await group.promote()
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        assert await promoted.value("SELECT token FROM fencing.fencing_lock WHERE name = 'a'") == stay.token
        await stay.end()
    assert log.of(Lost) == []


async def test_a_failover_that_comes_too_late_ends_the_body_in_time(postgresql_group):
    group = postgresql_group
    async with opened(group.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        await group.synced()
        group.primary.kill()
        await stay.over()
        assert stay.lost is not None
        await group.promote()
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > stay.token
