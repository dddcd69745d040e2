"""MemoryGuard: a resource within this process."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from fencing_sdk import StaleTokenError, Token, UsageError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing.suites import GuardSuite

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


class MemorySuite(GuardSuite):
    durable = False
    several = True

    @pytest.fixture
    def guard(self):
        self.data: dict[str, str] = {}
        return MemoryGuard()

    async def read(self, guard, resource):
        return self.data.get(resource)

    @asynccontextmanager
    async def reopen(self, guard):
        yield MemoryGuard()


class TestMemoryGuardWrite(MemorySuite):
    async def write(self, guard, resource, token, value):
        guard.write(resource, token, self.data.__setitem__, resource, value)

    async def write_all(self, guard, tokens, values):
        guard.write_all(tokens, self.data.update, values)


class TestMemoryGuardAdmitInOneLoop(MemorySuite):
    """`admit` is for one event loop: the write follows it without an await."""

    test_accepted_writes_never_go_down_among_threads = None
    test_no_update_is_lost_among_threads = None

    async def write(self, guard, resource, token, value):
        guard.admit(resource, token)
        self.data[resource] = value

    async def write_all(self, guard, tokens, values):
        guard.admit_all(tokens)
        self.data.update(values)


def test_the_functions_error_leaves_bare_and_the_guard_goes_on():
    guard = MemoryGuard()
    with pytest.raises(ZeroDivisionError):
        guard.write("a", 1, divmod, 1, 0)
    assert guard.write("a", 1, int) == 0


async def test_a_refused_write_does_not_call_the_function():
    guard, calls = MemoryGuard(), []
    await guard.raise_to("a", NEW)
    with pytest.raises(StaleTokenError):
        guard.write("a", OLD, calls.append, "stale")
    assert calls == []


async def test_no_fence_is_raised_while_another_thread_is_between_check_and_write():
    guard = MemoryGuard()
    inside, go_on = threading.Event(), threading.Event()
    history: list[str] = []

    def slow_write():
        inside.set()
        assert go_on.wait(10)
        history.append("written with 33")

    writer = asyncio.create_task(asyncio.to_thread(guard.write, "a", OLD, slow_write))
    await asyncio.to_thread(inside.wait, 10)
    raiser = asyncio.create_task(asyncio.to_thread(asyncio.run, guard.raise_to("a", NEW)))
    done, _ = await asyncio.wait([raiser], timeout=0.2)
    assert not done, "the fence was raised to 34 although a write with 33 was under way"
    go_on.set()
    await asyncio.gather(writer, raiser)
    assert history == ["written with 33"]
    with pytest.raises(StaleTokenError):
        guard.write("a", OLD, history.append, "stale")


def test_a_guarded_function_may_write_to_another_resource():
    guard, data = MemoryGuard(), {}

    def both():
        data["a"] = 1
        guard.write("b", 5, data.__setitem__, "b", 2)

    guard.write("a", 3, both)
    assert data == {"a": 1, "b": 2}


def test_an_async_function_is_refused_before_the_fence_moves():
    async def write():
        pytest.fail("must not run")

    guard = MemoryGuard()
    with pytest.raises(UsageError, match="async def"):
        guard.write("a", 34, write)
    guard.admit("a", 1)


async def test_a_function_that_returns_an_awaitable_is_refused():
    """Its writes would come after the check. A coroutine is closed; a future is somebody else's."""

    async def write():
        pytest.fail("must not run")

    future = asyncio.get_running_loop().create_future()
    for function in (lambda: write(), lambda: future):  # noqa: PLW0108  (a lambda hides the coroutine function)
        with pytest.raises(UsageError, match="awaitable"):
            MemoryGuard().write("a", 34, function)
    assert not future.done()


async def test_an_observer_that_raises_opens_no_gate(caplog):
    def broken(event):
        raise ZeroDivisionError

    guard = MemoryGuard(observers=[broken])
    await guard.raise_to("a", NEW)
    with pytest.raises(StaleTokenError):
        guard.admit("a", OLD)
    assert "observer" in caplog.text
