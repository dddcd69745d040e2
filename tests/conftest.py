"""Loops, and the stage on which a caller's ``async with lock`` is watched."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import inspect
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import campaigns
import hypothesis
import kazoo.protocol.connection
import last_lines
import pytest
import recorded_run
from blockbuster import blockbuster_ctx
from inside import held_here
from looking import holder
from rewritten_once import rewrite_assertions

import fencing_sdk
from fencing_sdk import LeaseLostError, Lock, LockClient, LossReason
from fencing_sdk.abc import Gone
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Event
from fencing_sdk.testing import FaultyBackend

PACKAGE = Path(fencing_sdk.__file__).parent
os.environ["SANIC_TOUCHUP"] = "false"  # Sanic rewrites its own methods when it starts, which works once in a process

pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("stores/*_suite.py")))

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
OTHER_LOOPS = {"eager", "uvloop"}
"""Columns of the tests for every loop that only a run with ``--all`` has."""


def _eager_loop() -> asyncio.AbstractEventLoop:
    """Make a loop whose tasks run at once, up to their first suspension."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def _loops() -> dict[str, LoopFactory]:
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if sys.version_info >= (3, 12):
        loops["eager"] = _eager_loop
    if importlib.util.find_spec("uvloop"):
        import uvloop

        loops["uvloop"] = uvloop.new_event_loop
    return loops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too, and those of every event loop")
    parser.addoption("--campaigns", action="store_true", help="play campaigns in full length")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_loop: run on asyncio, on asyncio with eager tasks (3.12+), and on uvloop")
    config.addinivalue_line("markers", "slow: runs with --all, --campaigns, or where its file is named")
    config.addinivalue_line("markers", "server: asks for a program that is installed apart; marked by what it calls")
    config.addinivalue_line("markers", "campaign: is longer with --campaigns")
    campaigns.choose(full=config.getoption("--campaigns"))
    hypothesis.settings.load_profile("ci")  # the same examples in every run, and no limit of time
    gc.disable()  # what is collected stays until the end: looking for garbage in it took a fifth of the time


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before a run of everything starts its processes."""
    config = session.config
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if everything and config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        rewrite_assertions(Path(__file__).parent, config.get_terminal_writer().line)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage again, and never in the tests themselves."""
    gc.freeze()
    gc.enable()


@functools.cache
def _asks_for_a_server(function: Callable[..., object]) -> bool:
    """Whether *function* calls a function that skips a test where a server's program is missing, or may ask for one."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    by_name = "getfixturevalue" in code.co_names and Path(code.co_filename).is_relative_to(Path(__file__).parent)
    return by_name or any(name.partition("_")[0] == "require" for name in code.co_names)


SERVER_PROGRAMS = {
    *("redis-server", "redis-sentinel", "valkey-server", "initdb", "postgres", "pg_ctl", "pgbouncer", "etcd", "java"),
    *("mariadbd", "mariadb-install-db", "mysqld"),
    *("openssl", "cc", "promtool", "systemd-analyze", "kubectl"),
}
_test_without_servers: pytest.Item | None = None
"""The test that runs now, if it is not marked as one that needs a server."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Know which test runs."""
    global _test_without_servers  # noqa: PLW0603  (an audit hook has no other way to know it)
    _test_without_servers = None if item.get_closest_marker("server") else item
    try:
        return (yield)
    finally:
        _test_without_servers = None


def _refuse_servers(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail a test that starts a server and is not marked so: it would fail on each machine without that server."""
    if event != "subprocess.Popen" or _test_without_servers is None:
        return
    command = [arguments[1]] if isinstance(arguments[1], str | bytes | os.PathLike) else arguments[1]
    started = {Path(os.fsdecode(word)).name for word in command} & SERVER_PROGRAMS
    if started:
        pytest.fail(
            f"{', '.join(started)}: ask for it by a fixture of tests/servers, or call its require() in the test"
        )


sys.addaudithook(_refuse_servers)


LEFT_OUT = pytest.StashKey[int]()
"""How many slow tests a run leaves out."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a server or another event loop, and leave out what is slow where a run names no files."""
    long = config.getoption("--campaigns")
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [one.func for some in item._fixtureinfo.name2fixturedefs.values() for one in some]
            if any(map(_asks_for_a_server, [item.function, *fixtures])):
                item.add_marker("server")
            if hasattr(item, "callspec") and not OTHER_LOOPS.isdisjoint(item.callspec.id.split("-")):
                item.add_marker("slow")
        if long and item.get_closest_marker("campaign") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    chosen = named or long or config.getoption("--all")
    left_out = [] if chosen else [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(left_out)


def pytest_testnodedown(node: Any) -> None:
    """Take from a process of a parallel run how many it left out: each of them collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


@pytest.hookimpl(trylast=True)  # below the slowest tests: the last lines are read
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was left out and what failed by time; record the run, too, if the environment names a file for it."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} slow tests and columns of other event loops left out: --all runs them")
    last_lines.pytest_terminal_summary(terminalreporter)
    recorded_run.record(terminalreporter)


MEMORY, A_PROCESS = 2000, 380
"""Megabytes of a parallel run, and of one of its processes: it knows all tests, and some of them start others."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores, as most tests wait, within the memory; a few modules run faster in one process."""
    named = {argument.partition("::")[0] for argument in config.args}
    few = len(named) <= 3 and all(name.endswith(".py") for name in named)
    if few or "PYTEST_XDIST_WORKER" in os.environ:  # a test that runs pytest is one of several at a time itself
        return 0
    wanted = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")  # xdist asks for it where nothing else decides
    return int(wanted) if wanted else min((os.cpu_count() or 2) + 6, MEMORY // A_PROCESS)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run every test on asyncio, and those that ask for it on every loop."""
    return _loops() if item.get_closest_marker("every_loop") else {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> None:
    """
    Let the processes that the tests start hear signals that a shell or nohup ignores for the tests.

    Child processes ignore an ignored signal, too. They hear one that has a handler, even if the handler does nothing.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def kazoo_draws_elsewhere() -> None:
    """Let kazoo's threads have a generator of their own: Hypothesis takes each draw beside its own for the test's."""
    vars(kazoo.protocol.connection)["random"] = random.Random()


@pytest.fixture
def no_blocking_calls() -> Iterator[None]:
    """Turn a blocking call that the package makes inside an event loop into an error."""
    with blockbuster_ctx("fencing_sdk"):
        yield


@dataclass(frozen=True)
class Sight:
    """What the caller of some code saw, at the very moment the code was left."""

    value: object
    error: BaseException | None
    cancelling: int
    """`Task.cancelling()` of the caller's task."""
    held: tuple[str, ...]
    """The locks that the store still had granted."""
    leases: tuple[object, ...]
    """The leases that were still current in the caller's context."""

    @property
    def lost(self) -> tuple[str, LossReason] | None:
        """The lock and the reason of the bare `LeaseLostError` that left, if one did."""
        return (self.error.name, self.error.reason) if isinstance(self.error, LeaseLostError) else None

    @property
    def kind(self) -> type[BaseException] | None:
        return None if self.error is None else type(self.error)

    @property
    def notes(self) -> list[str]:
        return getattr(self.error, "__notes__", [])

    @property
    def tidy(self) -> bool:
        """Nothing is left behind: no lock in the store, no lease in the context, no cancellation on the task."""
        return not self.held and not self.leases and self.cancelling == 0


class Stage:
    """A store, a network in front of it, a client on that, and callers who are watched."""

    def __init__(self) -> None:
        self.store = MemoryBackend(tokens="counter")
        self.network = FaultyBackend(self.store)
        self.client = LockClient(self.network, observers=[self._note])
        self.names: list[str] = []
        self.events: list[Event] = []
        self._expected: list[tuple[str, asyncio.Future[Event]]] = []

    def lock(self, name: str = "a", **options: Any) -> Lock:
        """A lock that is renewed all the time, so that a refusal is noticed soon, and that nothing else ends."""
        if name not in self.names:
            self.names.append(name)
        return self.client.lock(name, **({"ttl": 10, "heartbeat_interval": 0.02} | options))

    def soon(self, *calls: Callable[[], object]) -> None:
        """Make *calls* one after the other, in one turn of the loop, after the caller had time to suspend."""
        loop = asyncio.get_running_loop()
        # uvloop runs a timer before the callbacks that are ready already, and the caller may be one of those.
        loop.call_later(0.01, loop.call_soon, lambda: [call() for call in calls])

    def revoke(self, name: str = "a") -> None:
        self.store.take_away(name)

    def revoke_and_ring(self) -> None:
        """Let the store end each ticket, and its bell ring in this very turn of the loop."""
        for bell in tuple(self.store._bells.values()):
            bell(Gone(""))
        for name in self.names:
            self.store.take_away(name)

    def revoke_soon(self, name: str = "a") -> None:
        """Let the store take the lock away, and say so, while the caller is suspended."""
        self.soon(lambda: self.store.take_away(name))

    def _note(self, event: Event) -> None:
        self.events.append(event)
        for kind, future in self._expected:
            if kind == event.kind and not future.done():
                future.set_result(event)

    async def heard(self, kind: str) -> Event:
        """Wait until the client tells of something of this *kind*."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._expected.append((kind, future))
        return await future

    async def free(self, name: str = "a") -> bool:
        return await holder(self.store, name) is None

    async def watch(self, caller: Callable[[], Awaitable[object]]) -> Sight:
        """Run *caller* in a task of its own and tell what it sees when it is left."""

        async def watched() -> Sight:
            value: object = None
            error: BaseException | None = None
            try:
                value = await caller()
            except BaseException as left:
                error = left
            task = asyncio.current_task()
            assert task is not None
            held = tuple([name for name in self.names if not await self.free(name)])
            return Sight(value, error, task.cancelling(), held, held_here())

        return await asyncio.get_running_loop().create_task(watched())


@contextlib.contextmanager
def no_loose_ends() -> Iterator[None]:
    """Refuse errors that only the loop's exception handler gets to see, such as "was never retrieved"."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    assert not unhandled


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A stage, and afterwards the proof that the client left no task and no unhandled error behind."""
    stage = Stage()
    before = asyncio.all_tasks()
    with no_loose_ends():
        async with stage.client:
            yield stage
            stage.network.heal()
        assert [task for task in asyncio.all_tasks() - before if _runs_the_package(task)] == []


def _runs_the_package(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).is_relative_to(PACKAGE)
