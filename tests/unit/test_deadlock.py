"""A task that waits for a lock under which it was started is named after one ttl, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import Context

import pytest
from virtual_time import in_virtual_time, settle

from fencing_sdk import LockClient, UsageError
from fencing_sdk._values.clock import LoopClock
from fencing_sdk.backends.memory import MemoryBackend

TTL = 10.0
WARNING = (
    "task 'helper' has waited 10 s for lock 'a', which task 'parent' holds and under which it was started; "
    "if that task waits for it, neither goes on: locks are not reentrant"
)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[LockClient]:
    asyncio.current_task().set_name("parent")
    async with LockClient(MemoryBackend(clock=LoopClock()), clock=LoopClock(), watch_stalls=False) as locks:
        yield locks


async def hold(locks: LockClient, name: str = "a", **options) -> None:
    async with locks.lock(name, ttl=TTL, **options):
        pass


def helper(locks: LockClient, **options) -> asyncio.Task[None]:
    return asyncio.create_task(hold(locks, **options), name="helper")


@in_virtual_time
async def test_a_task_that_waits_for_the_lock_of_its_parent_is_named_once_after_one_ttl(caplog):
    async with opened() as locks:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10 * TTL), locks.lock("a", ttl=TTL):
                task = helper(locks)
                await asyncio.sleep(TTL - 0.01)
                assert not caplog.messages
                await asyncio.sleep(0.02)
                assert caplog.messages == [WARNING]
                await asyncio.gather(task)
    assert caplog.messages == [WARNING]


@in_virtual_time
async def test_every_wait_is_named_and_so_is_a_grandchild(caplog):
    async with opened() as locks:
        async with locks.lock("a", ttl=TTL), locks.lock("b", ttl=TTL):
            tasks = [helper(locks), helper(locks, name="b")]

            async def between() -> None:
                await helper(locks)

            tasks.append(asyncio.create_task(between()))
            await asyncio.sleep(2 * TTL)
        await asyncio.gather(*tasks)
    assert sorted(caplog.messages) == [WARNING, WARNING, WARNING.replace("'a'", "'b'")]


@in_virtual_time
async def test_a_plain_handle_is_waited_for_with_the_same_warning(caplog):
    async def take(locks: LockClient) -> None:
        await (await locks.lock("a", ttl=TTL).acquire()).release()

    async with opened() as locks:
        async with locks.lock("a", ttl=TTL):
            task = asyncio.create_task(take(locks), name="helper")
            await asyncio.sleep(2 * TTL)
        await task
    assert caplog.messages == [WARNING]


@in_virtual_time
async def test_a_child_that_gets_its_turn_or_gives_up_in_time_is_not_named(caplog):
    async with opened() as locks:
        async with locks.lock("a", ttl=TTL):
            task = helper(locks)
            impatient = helper(locks, wait=TTL / 2)
            await asyncio.sleep(0.9 * TTL)
            assert isinstance(impatient.exception(), TimeoutError)
        await task
        await asyncio.sleep(TTL)
    assert not caplog.messages


@in_virtual_time
async def test_a_wait_for_another_lock_or_the_lock_of_another_client_is_not_named(caplog):
    async with opened() as locks, opened() as others:
        handles = [await locks.lock("b", ttl=TTL).acquire(), await others.lock("a", ttl=TTL).acquire()]
        async with locks.lock("a", ttl=TTL):
            tasks = [helper(locks, name="b"), helper(others, name="a")]
            await asyncio.sleep(2 * TTL)
            assert not any(task.done() for task in tasks)
        for handle in handles:
            await handle.release()
        await asyncio.gather(*tasks)
    assert not caplog.messages


@in_virtual_time
async def test_a_wait_that_outlasts_the_parent_is_not_named(caplog):
    async def hold_for_long(locks: LockClient) -> None:
        async with locks.lock("a", ttl=TTL):
            await asyncio.sleep(3 * TTL)

    async with opened() as locks:
        async with locks.lock("a", ttl=TTL):
            first = asyncio.create_task(hold_for_long(locks), context=Context())
            await settle()
            second = helper(locks)
            await asyncio.sleep(TTL / 2)
        await asyncio.sleep(TTL)
        assert not second.done()
        await asyncio.gather(first, second)
    assert not caplog.messages


@in_virtual_time
async def test_a_task_that_holds_the_lock_itself_is_refused_at_once(caplog):
    async with opened() as locks, locks.lock("a", ttl=TTL):
        with pytest.raises(UsageError, match="this task holds lock 'a' already; locks are not reentrant"):
            await hold(locks)
        assert await locks.lock("a").try_acquire() is None
    assert not caplog.messages


@in_virtual_time
async def test_names_of_tasks_cannot_forge_the_log(caplog):
    async with opened() as locks:
        async with locks.lock("a\u2028", ttl=TTL):
            task = asyncio.create_task(hold(locks, "a\u2028"), name="helper\nCRITICAL forged")
            await asyncio.sleep(2 * TTL)
        await task
    (message,) = caplog.messages
    assert message.isprintable()


@in_virtual_time
async def test_no_timer_is_left_behind(caplog):
    async with opened() as locks:
        async with locks.lock("a", ttl=TTL):
            task = helper(locks)
            await settle()
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(2 * TTL)
    assert not caplog.messages
