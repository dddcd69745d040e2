"""Cancel scopes lose no cancellation with an older anyio, and do without the private names of a later one."""

import asyncio
import inspect
import re
from collections.abc import Iterator

import anyio
import pytest
from anyio._backends import _asyncio
from virtual_time import in_virtual_time

from fencing_sdk import LeaseLostError, LockClient, UsageError
from fencing_sdk._engine import cancellation
from fencing_sdk._values import scopes
from fencing_sdk.backends.memory import MemoryBackend


class BeforeCounting(_asyncio.CancelScope):
    """anyio's scope before 4.16: it takes a cancellation that came in the same turn for its own."""

    _cancelling_at_enter = property(lambda _: 1000, lambda _, __: None)


def without(name: str) -> type[anyio.CancelScope]:
    """Return anyio's scope with another private name for *name*."""
    source = inspect.getsource(_asyncio.CancelScope)
    known = dict(vars(_asyncio))
    exec(re.sub(rf"\b{name}\b", f"{name}_renamed", source), known)
    return known["CancelScope"]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Have the package find another scope of anyio."""

    def use(found: type[anyio.CancelScope]) -> None:
        monkeypatch.setattr(scopes, "scope_class", lambda: found)
        monkeypatch.setattr(cancellation, "scope_class", lambda: found)
        forget()

    def forget() -> None:
        scopes._combined.cache_clear()
        cancellation._best_kind.cache_clear()

    yield use
    forget()


ANYIOS = pytest.mark.parametrize("found", [_asyncio.CancelScope, BeforeCounting], ids=["this", "before 4.16"])


def cancel_in(seconds: float, task: asyncio.Task) -> None:
    asyncio.get_running_loop().call_later(seconds, task.cancel)


async def ends_cancelled(task: asyncio.Task) -> bool:
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    return task.cancelled()


@ANYIOS
def test_a_cancellation_in_the_turn_in_which_a_limit_ends_is_not_lost(found, use):
    use(found)

    @in_virtual_time
    async def test() -> None:
        async def work() -> None:
            while True:
                with scopes.move_on_after(1):
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        cancel_in(1, task)
        assert await ends_cancelled(task)

    test()


@ANYIOS
def test_a_cancellation_in_the_turn_in_which_a_leader_resigns_ends_the_loop(found, use):
    use(found)

    @in_virtual_time
    async def test() -> None:
        async with LockClient(MemoryBackend(), watch_stalls=False) as locks:
            election = locks.election("scheduler")

            async def lead() -> None:
                async for term in election:
                    async with term:
                        await asyncio.Event().wait()

            task = asyncio.create_task(lead())
            await asyncio.sleep(1)
            assert election.leading
            election.resign()
            task.cancel()
            assert await ends_cancelled(task)
            assert not election.leading

    test()


@pytest.mark.parametrize("name", cancellation._PRIVATE)
async def test_a_private_name_of_anyio_that_is_gone_costs_the_pace_alone(name, use):
    use(without(name))
    store = MemoryBackend()
    async with LockClient(store) as locks:
        assert type(cancellation.paced_scope(1.0)).__mro__[1] is cancellation.PlainScope
        async with locks.lock("a"):
            pass
        with pytest.raises(LeaseLostError):
            async with locks.lock("a"):
                store.take_away("a")
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), locks.lock("a"):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        outer, inner = locks.lock("b"), locks.lock("c")
        await outer.__aenter__()
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        await inner.__aexit__(None, None, None)
        await outer.__aenter__()
        with pytest.raises(UsageError, match="left in another"):
            await asyncio.create_task(outer.__aexit__(None, None, None))
        store.take_away("b")
        await asyncio.sleep(0.05)
    assert await store.inspect("a") is None


async def test_the_anyio_that_is_here_has_the_names():
    assert cancellation._best_kind() is cancellation.PacedScope
