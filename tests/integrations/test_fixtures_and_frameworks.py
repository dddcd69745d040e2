"""
Where the entry and the exit of a lock run in different tasks, and where they do not.

Plug-ins of pytest run here in an interpreter of their own each, as their users run them.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import unittest
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient as StarletteClient

from fencing_sdk import LockClient, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.integrations.asgi import lifespan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


# Test frameworks

PRELUDE = """
import asyncio
import pytest
from fencing_sdk import LockClient, UsageError, current_lease, current_token
from fencing_sdk.backends.memory import MemoryBackend

store = MemoryBackend(tokens="counter")
"""


def run_tests(folder, plugin, tests):
    """Run *tests* in a fresh interpreter with one plug-in and warnings as errors; return the outcome and the output."""
    folder.joinpath("test_it.py").write_text(PRELUDE + textwrap.dedent(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *plugin, "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=55)
    return process.stdout.splitlines()[-1].split(" in ")[0], process.stdout


PYTEST_ASYNCIO = (
    *("-p", "pytest_asyncio.plugin"),
    *("-o", "asyncio_mode=auto"),
    *("-o", "asyncio_default_fixture_loop_scope=function"),
)
ANYIO = ("-p", "anyio.pytest_plugin")


def test_a_pytest_asyncio_fixture_holds_a_client_and_a_plain_handle(tmp_path):
    outcome, output = run_tests(
        tmp_path,
        PYTEST_ASYNCIO,
        """
        @pytest.fixture
        async def locks():
            async with LockClient(store) as locks:
                yield locks

        @pytest.fixture
        async def seat(locks):
            async with await locks.lock("seats/42").acquire() as lease:
                yield lease

        async def test_it_is_held(locks, seat):
            assert (await locks.inspect("seats/42")).token == seat.token

        async def test_it_was_released_and_is_held_again(locks, seat):
            assert seat.token == 2
        """,
    )
    assert outcome == "2 passed", output


def test_a_pytest_asyncio_fixture_that_yields_inside_a_lock_is_told_about_the_plain_handle(tmp_path):
    outcome, output = run_tests(
        tmp_path,
        PYTEST_ASYNCIO,
        """
        @pytest.fixture
        async def seat():
            async with LockClient(store) as locks:
                async with locks.lock("seats/42", max_hold=2.0) as lease:
                    yield lease

        async def test_past_the_deadline_nobody_is_cancelled(seat):
            await asyncio.sleep(2.1)
            assert not seat.held

        async def test_the_lock_was_released_all_the_same(seat):
            assert seat.token == 2
        """,
    )
    assert outcome == "2 passed, 2 errors", output
    heard = [line for line in output.splitlines() if "UsageError: lock 'seats/42' was entered in one task" in line]
    assert len([line for line in heard if line.startswith("E ")]) == 2, output
    assert "async with await lock.acquire() as lease" in output


def test_a_pytest_asyncio_fixture_that_drains_on_a_signal_is_told_about_the_client_that_drains(tmp_path):
    summary, output = run_tests(
        tmp_path,
        PYTEST_ASYNCIO,
        """
        import signal

        @pytest.fixture
        async def on_a_signal():
            async with LockClient(store) as locks, locks.draining_on(signal.SIGTERM, within=25):
                yield locks

        @pytest.fixture
        async def drains():
            async with LockClient(store, drain=25) as locks:
                yield locks

        async def test_one(on_a_signal):
            pass

        async def test_the_other(drains):
            async with drains.lock("a"):
                pass
        """,
    )
    assert summary == "2 passed, 1 error"
    assert "instead: connect(url, drain=25)" in output


def test_a_lifespan_that_drains_on_a_signal_is_told_about_the_client_that_drains(store):
    """`TestClient` of Starlette runs it in another thread than the main one."""

    @asynccontextmanager
    async def on_a_signal(_):
        async with LockClient(store) as locks, locks.draining_on(signal.SIGTERM, within=25):
            yield

    with pytest.raises(UsageError, match=r"main thread .* lifespan=lifespan\(locks\)"):
        StarletteClient(Starlette(lifespan=on_a_signal)).__enter__()
    locks = LockClient(store, drain=25)

    async def work(_):
        async with locks.lock("a"):
            return PlainTextResponse("worked")

    with StarletteClient(Starlette(routes=[Route("/", work)], lifespan=lifespan(locks))) as client:
        assert client.get("/").text == "worked"


def test_a_lock_inside_an_anyio_fixture_works_because_one_task_runs_it_all(tmp_path):
    outcome, output = run_tests(
        tmp_path,
        ANYIO,
        """
        pytestmark = pytest.mark.anyio

        @pytest.fixture(params=["asyncio", pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
        def anyio_backend(request):
            return request.param

        @pytest.fixture
        async def seat(anyio_backend):
            async with LockClient(store) as locks, locks.lock("seats/42") as lease:
                yield lease
            assert await store.tickets(["seats/42"]) == [[]]

        async def test_it_is_held(seat):
            assert seat.held
            ((ticket,),) = await store.tickets(["seats/42"])
            assert ticket.token == seat.token

        async def test_a_lock_in_a_test(anyio_backend):
            async with LockClient(store) as locks, locks.lock("a") as lease:
                assert current_lease() is lease

        async def test_a_loss_fails_the_test(anyio_backend):
            async with LockClient(store) as locks, locks.lock("a"):
                asyncio.get_running_loop().call_soon(store.take_away, "a")
                await asyncio.sleep(30)
        """,
    )
    assert outcome == "2 failed, 4 passed", output
    assert output.count("LeaseLostError: lease on 'a'") >= 2
    assert "an operator took it away" in output


async def tickets_of(store):
    (found,) = await store.tickets(["a"])
    return found


def outcome_of(case):
    result = unittest.TestResult()
    case("test_it_is_held").run(result)
    assert result.testsRun == 1
    return [text for _, text in result.errors + result.failures]


def test_a_unittest_case_that_enters_a_lock_in_its_set_up_is_told_about_the_plain_handle(store):
    class Case(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self):
            locks = await self.enterAsyncContext(LockClient(store))
            self.lease = await self.enterAsyncContext(locks.lock("a"))

        async def test_it_is_held(self):
            assert self.lease.held

    (error,) = outcome_of(Case)
    assert "async with await lock.acquire() as lease" in error
    assert not asyncio.run(tickets_of(store))
