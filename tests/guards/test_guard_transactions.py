"""SqlGuard in transactions of every kind, on every server: what is true of all of them, one or several at a time."""

import asyncio
import contextlib
import sqlite3
from contextlib import closing

import anyio
import pytest
from mysql_ways import every_way

from fencing_sdk import LeaseLostError, LockClient, StaleTokenError, Token
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.sql import SqlGuard

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures", "guard_database", "guard_stages"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")
LEVELS = ("read committed", "repeatable read", "serializable")


# The fence is part of the caller's transaction, of whatever kind.


@pytest.mark.every_loop
@every_way
async def test_fence_and_data_are_committed_together(way):
    guard = SqlGuard()
    async with way.begin() as transaction:
        await way.admit(guard, transaction, "a", NEW)
        await way.put(transaction, "a", "new")
        assert (await way.stage.fence(), await way.read("a")) == (None, None)
    assert (await way.stage.fence(), await way.read("a")) == (34, "new")
    with pytest.raises(StaleTokenError) as refusal:
        await way.write(guard, "a", OLD, "old")
    assert (refusal.value.token, refusal.value.fence, refusal.value.conflict) == (33, 34, False)
    with pytest.raises(StaleTokenError) as refusal:
        await way.write(guard, "a", Token(34, "cccccccc"), "conflict")
    assert refusal.value.conflict
    assert (await way.stage.fence(), await way.read("a")) == (34, "new")


@every_way
async def test_the_fences_of_several_resources_are_committed_together(way):
    guard, tokens, values = SqlGuard(), {"b": NEW, "a": 5}, {"a": "x", "b": "y"}
    await way.write_all(guard, tokens, values)
    assert [await way.stage.fence(name) for name in "ab"] == [5, 34]
    with pytest.raises(StaleTokenError) as refusal:
        await way.write_all(guard, {"a": 6, "b": OLD}, {"a": "stale", "b": "stale"})
    assert (refusal.value.resource, refusal.value.fence) == ("b", 34)
    assert [await way.stage.fence(name) for name in "ab"] == [5, 34], "the transaction was rolled back"
    assert [await way.read(name) for name in "ab"] == ["x", "y"]


@every_way
async def test_rolling_back_takes_the_fence_back(way):
    guard = SqlGuard()
    await way.write(guard, "a", 3, "first")
    with pytest.raises(ZeroDivisionError):
        async with way.begin() as transaction:
            await way.admit(guard, transaction, "a", NEW)
            await way.put(transaction, "a", "never committed")
            raise ZeroDivisionError
    assert (await way.stage.fence(), await way.read("a")) == (3, "first")
    await way.write(guard, "a", OLD, "second")
    assert await way.stage.fence() == 33


@every_way
async def test_a_refusal_leaves_the_transaction_open_and_usable(way):
    """It is not an error of the server's, which would have spoilt a transaction of PostgreSQL."""
    guard = SqlGuard()
    await way.write(guard, "a", NEW, "new")
    async with way.begin() as transaction:
        await way.put(transaction, "b", "before")
        with pytest.raises(StaleTokenError):
            await way.admit(guard, transaction, "a", OLD)
        await way.admit(guard, transaction, "a", NEW)
        await way.put(transaction, "a", "newer")
    assert [await way.read("a"), await way.read("b")] == ["newer", "before"]


async def test_one_guard_serves_many_transactions_of_several_databases(way, tmp_path):
    """The database is known from the transaction."""
    guard = SqlGuard()
    await way.write(guard, "a", NEW, "new")
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection, connection:
        await guard.admit(connection, "a", OLD)
    await way.write(guard, "a", NEW, "newer")
    assert await way.stage.fence() == 34


async def test_names_are_parameters_and_never_part_of_a_statement(way):
    guard = SqlGuard()
    names = ["'; DROP TABLE data; --", "$1", "%s", "%(a)s", ":a", '"', "\\'", "$fencing$", "E'\\x00'", "\N{LOCK}"]
    for number, name in enumerate(names):
        await way.write(guard, name, number, name)
    assert [await way.stage.fence(name) for name in names] == [*range(len(names))]
    assert [await way.read(name) for name in names] == names


# Two writers.


@pytest.mark.parametrize("level", LEVELS)
async def test_a_stale_writer_that_waits_behind_a_later_one_is_never_admitted(way, level):
    """Refused at once where the row is looked at again; else the driver's error, and refused when it tries again."""
    guard = SqlGuard()
    await way.write(guard, "a", OLD, "old")
    async with contextlib.AsyncExitStack() as stack:
        holder = await stack.enter_async_context(way.begin(level))
        await way.admit(guard, holder, "a", NEW)

        async def zombie():
            async with way.begin(level) as transaction:
                await way.admit(guard, transaction, "a", OLD)
                await way.put(transaction, "a", "too late")

        late = asyncio.create_task(zombie())
        await way.stage.is_waiting()
        await way.put(holder, "a", "new")
    outcome = (await asyncio.gather(late, return_exceptions=True))[0]
    if isinstance(outcome, StaleTokenError):
        assert (outcome.token, outcome.fence) == (33, 34)
        assert level == LEVELS[0] or not way.stage.snapshots
    else:
        assert level != LEVELS[0]
        assert way.stage.wants_a_retry(outcome)
        with pytest.raises(StaleTokenError):  # as the caller's retry loop finds out
            await zombie()
    assert (await way.stage.fence(), await way.read("a")) == (34, "new")


@pytest.mark.parametrize("level", LEVELS)
async def test_a_transaction_that_looked_before_the_fence_was_raised_is_never_admitted(way, level):
    """What it sees is from before: a check by SELECT would let it in."""
    guard = SqlGuard(way.url)
    await guard.raise_to("a", OLD)

    async def zombie(*, meanwhile):
        async with way.begin(level) as transaction:
            assert await way.look(transaction, "a") is None
            await meanwhile()
            await way.admit(guard, transaction, "a", OLD)
            await way.put(transaction, "a", "too late")

    with pytest.raises(Exception, match=r".") as refusal:
        await zombie(meanwhile=lambda: guard.raise_to("a", NEW))
    if level == LEVELS[0] or not way.stage.snapshots:  # MariaDB may be set to snapshots, and is from 11.6 on
        assert isinstance(refusal.value, StaleTokenError) or (
            level != LEVELS[0] and way.stage.wants_a_retry(refusal.value)
        )
    else:
        assert way.stage.wants_a_retry(refusal.value)
    with pytest.raises(StaleTokenError):
        await zombie(meanwhile=lambda: asyncio.sleep(0))
    assert (await way.stage.fence(), await way.read("a")) == (34, None)


async def test_the_later_writer_waits_for_the_earlier_one_and_then_goes_on(way):
    guard = SqlGuard()
    await way.write(guard, "a", 1, "before")
    async with way.begin() as holder:
        await way.admit(guard, holder, "a", OLD)
        later = asyncio.create_task(way.write(guard, "a", NEW, "new"))
        await way.stage.is_waiting()
        await way.put(holder, "a", "old")
        assert not later.done()
    await later
    assert (await way.stage.fence(), await way.read("a")) == (34, "new")


async def test_a_zombie_is_admitted_if_the_later_writer_has_rolled_back(way):
    """What was not committed has not been seen."""
    guard = SqlGuard()
    await way.write(guard, "a", 1, "before")
    with contextlib.suppress(ZeroDivisionError):
        async with way.begin() as holder:
            await way.admit(guard, holder, "a", NEW)
            late = asyncio.create_task(way.write(guard, "a", OLD, "old"))
            await way.stage.is_waiting()
            raise ZeroDivisionError
    await late
    assert (await way.stage.fence(), await way.read("a")) == (33, "old")


# The guard's own transactions.


async def test_a_zombie_is_refused_from_the_moment_the_fence_is_raised(own_guard):
    """The next holder has written nothing yet."""
    guard, way, store = own_guard, own_guard.way, MemoryBackend()
    async with LockClient(store) as locks:
        lock = locks.lock("a", fences=[guard])
        zombie = await lock.acquire()
        stale = zombie.token
        await way.write(guard, "a", stale, "in time")
        store.take_away("a")
        async with lock as lease:
            with pytest.raises(StaleTokenError):
                await way.write(guard, "a", stale, "too late")
            assert await way.read("a") == "in time"
            await way.write(guard, "a", lease.token, "by the next holder")
        await zombie.release()


async def test_raising_waits_for_a_writer_and_is_let_go_when_it_is_cancelled(own_guard):
    """Nothing is left behind: no statement that waits at the server, no open transaction, no fence."""
    guard, way = own_guard, own_guard.way
    await guard.raise_to("a", OLD)
    async with way.begin() as transaction:
        await guard.admit(transaction, "a", OLD)
        raising = asyncio.create_task(guard.raise_to("a", NEW))
        await way.stage.is_waiting()
        raising.cancel()
        with anyio.fail_after(20):
            with pytest.raises(asyncio.CancelledError):
                await raising
            await way.stage.no_other_transaction(way, transaction)
    assert await way.stage.fence() == 33
    await guard.raise_to("a", NEW)


async def test_the_deadline_of_a_lease_ends_the_waiting_for_a_held_fence(own_guard):
    guard, way = own_guard, own_guard.way
    await guard.raise_to("a", 0)
    async with LockClient(MemoryBackend()) as locks, way.begin() as transaction:
        await guard.admit(transaction, "a", 0)
        with anyio.fail_after(20):
            with pytest.raises(LeaseLostError):
                await locks.lock("a", max_hold=0.3, fences=[guard]).acquire()
            await way.stage.no_other_transaction(way, transaction)
        assert await locks.inspect("a") is None
    assert await way.stage.fence() == 0


# In a given transaction.


@every_way
async def test_a_fence_is_raised_in_a_given_transaction_and_stands_once_that_is_committed(way):
    guard = SqlGuard()
    await way.write(guard, "a", OLD, "old")
    async with way.begin() as transaction:
        await raise_in(way, guard, transaction, NEW)
        assert await way.stage.fence() == 33
    assert await way.stage.fence() == 34
    async with way.begin() as transaction:
        with pytest.raises(StaleTokenError):
            await raise_in(way, guard, transaction, OLD)


async def test_waiting_in_a_given_transaction_is_bounded(way):
    """The connection may be one that others wait for, too."""
    guard = SqlGuard()
    await way.write(guard, "a", OLD, "old")
    async with way.begin() as holder:
        await way.admit(guard, holder, "a", OLD)
        with pytest.raises(Exception, match=r"(?i)lock (wait )?timeout") as refusal:
            async with way.begin() as transaction:
                await raise_in(way, guard, transaction, NEW, wait=0.05)
        assert way.stage.waited_too_long(refusal.value)
    assert await way.stage.fence() == 33


async def raise_in(way, guard, transaction, token, **options):
    if way.blocking:  # it is used where the coroutine runs
        await asyncio.to_thread(lambda: asyncio.run(guard.raise_in(transaction, "a", token, **options)))
    else:
        await guard.raise_in(transaction, "a", token, **options)
