"""The backend on the page about backends passes the suite, whichever plugin runs the tests."""

import asyncio
import re
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Renewal

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ANYIO = "\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
AUTO = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function")
STRICT = ("asyncio_mode=strict", "asyncio_default_fixture_loop_scope=function")
PLUGINS = {
    "asyncio, strict mode": (STRICT, "\npytestmark = pytest.mark.asyncio\n"),
    "anyio": (("addopts=-p no:asyncio",), ANYIO + "\npytestmark = pytest.mark.anyio\n"),
}


CODE = "".join(block for block in BLOCKS if not block.startswith("from fencing_sdk import connect"))


def run(folder: Path, code: str, options: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n" + "\n".join(options))
    (folder / "test_kv.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


PAGE_MODULE: dict[str, Any] = {"__name__": __name__}
exec(CODE, PAGE_MODULE)
SUITES = {name: suite for name, suite in PAGE_MODULE.items() if name.startswith("Test")}
globals().update(SUITES)  # pytest collects them here, one by one


def test_the_page_passes_its_own_suite():
    assert len(SUITES) == 4
    tests = {name for suite in SUITES.values() for name in dir(suite) if name.startswith("test_")}
    assert len(tests) >= 100


@pytest.mark.parametrize("backend", ["KvBackend", "RowBackend"])
async def test_a_renewal_without_an_answer_takes_no_other_one_along(backend: str):
    """The suite cannot make one key fail, so it would not see it."""
    page = PAGE_MODULE
    kv = page["MessagingKv"]()
    backend_of_page = page["KvBackend"](kv) if backend == "KvBackend" else page["RowBackend"](page["KvStore"](kv))
    claims = [Claim(name, 60.0) for name in "abc"]
    for claim in claims:
        await backend_of_page.acquire(claim)
    made, asked = kv.get, []

    async def breaks(key: str) -> object:
        asked.append(key)
        if len(asked) == 2:
            raise ConnectionError
        return await made(key)

    kv.get = breaks
    assert await backend_of_page.renew(claims) == [Renewal.RENEWED, Renewal.UNKNOWN, Renewal.RENEWED]


async def test_waiters_of_one_client_do_not_ask_a_store_that_wakes_no_waiter():
    page = PAGE_MODULE
    kv, asked = page["Kv"](), []
    read = kv.get

    def get(key: str) -> object:
        asked.append(key)
        return read(key)

    async with LockClient(page["PollingKvBackend"](kv)) as locks:
        lease = await locks.lock("a").acquire()
        kv.get = get
        waiting = [asyncio.create_task(locks.lock("a", wait=60).acquire()) for _ in range(20)]
        await asyncio.sleep(0.5)
        assert len(asked) <= 20, "one question each, and none after that"
        await lease.release()
        for task in waiting:  # in the order in which they came
            await (await task).release()


async def test_a_driver_that_blocks_does_not_hold_up_the_event_loop():
    page = PAGE_MODULE
    kv, answer = page["BlockingKv"](), threading.Event()
    read = kv.get

    def get(key: str) -> object:
        assert answer.wait(60)
        return read(key)

    kv.get = get
    async with aclosing(page["ThreadedKvBackend"](kv)) as backend:
        asking = asyncio.create_task(backend.inspect("a"))
        await asyncio.sleep(0.05)  # the loop has its turns
        answer.set()
        assert await asking is None


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_suite_runs_under_any_plugin(tmp_path: Path, plugin: str):
    options, lines = PLUGINS[plugin]
    done = run(tmp_path, CODE + lines, options, "-k", "declared or token or outage or patience or odd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20


HALF = """
import pytest
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import BackendSuite

class TestNothing(BackendSuite): pass

class TestHalf(BackendSuite):
    queues = notices = True

    @pytest.fixture
    def backend(self):
        return MemoryBackend()
"""


@pytest.mark.slow
def test_a_suite_without_its_fixtures_says_what_to_provide(tmp_path: Path):
    done = run(tmp_path, HALF, AUTO, "-k", "survive or processes or outage or giving_back")
    assert done.returncode == 1
    for missing in ("fixture 'backend'", "fixture 'reopen'", "fixture 'url'", "break_store()", "revoke()"):
        assert f"provide a {missing}" in done.stdout or f"provide {missing}" in done.stdout


@pytest.mark.slow
def test_a_failed_promise_is_explained_with_its_values(tmp_path: Path):
    assert "row.token + 1" in CODE
    done = run(tmp_path, CODE.replace("row.token + 1", "7"), AUTO, "-k", "tokens_grow_after_a_release")
    assert done.returncode == 1
    assert "assert [7, 7, 7, 7, 7] == [7]" in done.stdout
