"""
What happens when the holder of a lock is frozen, killed or outlived: our locks and other packages', by the same steps.

    uv run --with-requirements benchmarks/others.txt python -m benchmarks.others [NAME ...]

Starts a server of each store, and prints rows of docs/others.md in about six minutes. The steps, with a ttl of 2 s:

1. A block of 6 s runs. Another process that tries to enter has to wait if the lock is renewed.
2. A holder is killed by SIGKILL, and another process waits for its lock.
3. The first of three processes enters its block, and is stopped by SIGSTOP for 5 s. The second tries all the while.
4. The first is resumed, and has 2 s of work left. Then the third tries once: it succeeds if the end of the first block
   has freed the lock of the second. (A lock that is not renewed has a ttl of 30 s there, so it does not end by itself.)

A package needs one function here, which returns a context manager, or an asynchronous one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer
from redis_server import RedisServer
from zookeeper_server import ZooKeeperServer

SERVERS: dict[str, Any] = {"redis": RedisServer, "postgresql": PostgresqlServer, "mysql": MysqlServer}
SERVERS |= {"etcd": EtcdCluster, "zookeeper": ZooKeeperServer}
TTL = 2.0
FREEZE = 5.0
WORK = 2.5
LONG = 3 * TTL
STEP = 0.1
PATIENCE = 30.0  # for which a process tries to enter
MARK = "> "  # begins our lines: some packages log to the same place


@dataclass(frozen=True)
class Where:
    """A lock, and how to take it: *wait* is 0 for one attempt."""

    url: str
    name: str
    ttl: float = TTL
    wait: float = PATIENCE


Hold = Callable[[Where], Any]
ADAPTERS: dict[str, tuple[str, str, Hold]] = {}
"""By the name in the table: the package, the store, and the function."""


def adapter(label: str, package: str, *stores: str) -> Callable[[Hold], Hold]:
    def add(hold: Hold) -> Hold:
        ADAPTERS.update({f"{label}, {store}": (package, store, hold) for store in stores})
        return hold

    return add


def redis_at(url: str) -> Any:
    return import_module("redis").Redis.from_url(url)


@adapter("fencing_sdk", "fencing-sdk", "sqlite", "redis", "postgresql", "mysql", "etcd", "zookeeper")
def ours(it: Where) -> Any:
    client = import_module("fencing_sdk").connect(it.url)

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        async with client, client.lock(it.name, ttl=it.ttl, wait=it.wait):
            yield

    return hold()


@adapter("fencing_sdk.sync", "fencing-sdk", "redis")
def ours_in_threads(it: Where) -> Any:
    client = import_module("fencing_sdk.sync").connect(it.url).__enter__()
    return client.lock(it.name, ttl=it.ttl, wait=it.wait)


@adapter("redis-py `Lock`", "redis", "redis")
def redis_py(it: Where) -> Any:
    return redis_at(it.url).lock(it.name, timeout=it.ttl, blocking=it.wait > 0, blocking_timeout=it.wait)


@adapter("kazoo `Lock`", "kazoo", "zookeeper")
def kazoo(it: Where) -> Any:
    client = import_module("kazoo.client").KazooClient(it.url.removeprefix("zk://"), timeout=it.ttl)
    client.start()
    lock = client.Lock(f"/{it.name}")

    @contextmanager
    def hold() -> Iterator[None]:
        if not lock.acquire(blocking=it.wait > 0, timeout=it.wait or None):
            raise TimeoutError
        try:
            yield
        finally:
            lock.release()

    return hold()


@adapter("filelock `SoftFileLease`", "filelock", "file")
def filelock(it: Where) -> Any:
    kind = import_module("filelock").SoftFileLease
    return kind(f"{it.url}/{it.name}", lease_duration=it.ttl, timeout=it.wait)


@adapter("portalocker `RedisLock`", "portalocker", "redis")
def portalocker(it: Where) -> Any:
    server = {"host": "127.0.0.1", "port": int(it.url.rpartition(":")[2])}
    kind = import_module("portalocker").RedisLock
    return kind(it.name, redis_kwargs=server, timeout=it.wait, fail_when_locked=not it.wait)


@adapter("py-cachify `lock`", "py-cachify", "redis")
def py_cachify(it: Where) -> Any:
    package = import_module("py_cachify")
    package.init_cachify(sync_client=redis_at(it.url))
    return package.lock(it.name, nowait=not it.wait, timeout=it.wait, exp=int(it.ttl))


@adapter("mithril-locks `Lock(auto_renewal=True)`", "mithril-locks", "redis")
def mithril(it: Where) -> Any:
    backend = import_module("mithril.backends").RedisBackend(redis_at(it.url))
    kind = import_module("mithril").Lock
    return kind(it.name, backend=backend, ttl=it.ttl, timeout=it.wait, auto_renewal=True)


def say(word: str) -> None:
    print(f"{MARK}{word}", flush=True)


def process(label: str, where: Where, work: float) -> None:
    """Enter the block when the parent says so, work, and report the outcome."""
    manager, left, entered = ADAPTERS[label][2](where), round(work / STEP), False

    def steps() -> Iterator[None]:
        nonlocal left, entered
        entered = True
        say("in")
        while left:
            yield
            left -= 1

    async def in_a_task() -> None:
        async with manager:
            for _ in steps():
                await asyncio.sleep(STEP)

    def in_a_thread() -> None:
        with manager:
            for _ in steps():
                time.sleep(STEP)

    say("ready")
    sys.stdin.readline()
    outcome = "nothing"
    try:
        in_a_thread() if hasattr(manager, "__enter__") else asyncio.run(in_a_task())
    except BaseException as error:  # noqa: BLE001
        outcome = f"`{type(error).__name__}`"
    say(outcome + (", body stopped" if left else "") if entered else f"refused: {outcome}")
    os._exit(0)


class Process:
    """A child process, which has imported its package and waits for `go`."""

    def __init__(self, label: str, where: Where, *, work: float = 0.0) -> None:
        words = ["--process", label, where.url, where.name, str(where.ttl), str(where.wait), str(work)]
        command = [sys.executable, "-m", "benchmarks.others", *words]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.next()[1] == "ready", label

    def _read(self) -> None:
        for line in self._child.stdout or ():
            if line.startswith(MARK):
                self._lines.put((time.monotonic(), line.strip().removeprefix(MARK)))

    def go(self) -> None:
        print(file=self._child.stdin, flush=True)

    def next(self) -> tuple[float, str]:
        """The next line, and its moment."""
        return self._lines.get(timeout=4 * PATIENCE)

    def enters(self) -> float:
        """Let it go, and return the moment at which it is in; infinity if it is refused."""
        self.go()
        moment, said = self.next()
        return moment if said == "in" else float("inf")

    def signal(self, number: signal.Signals) -> float:
        self._child.send_signal(number)
        return time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()


def long_body(label: str, where: Where) -> float:
    """Seconds after which another process enters beside a block of `LONG`."""
    with Process(label, where, work=LONG) as first, Process(label, where) as second:
        begun = first.enters()
        return second.enters() - begun


def kill(label: str, where: Where) -> float:
    """Seconds from the SIGKILL of a holder until another process enters."""
    with Process(label, where, work=PATIENCE) as first, Process(label, where) as second:
        first.enters()
        killed = first.signal(signal.SIGKILL)
        return second.enters() - killed


def freeze(label: str, where: Where, ttl: float) -> tuple[str, bool, float]:
    """What leaves the first block, whether its end frees the lock of the second, and when the second entered."""
    longer, once = Where(where.url, where.name, ttl), Where(where.url, where.name, ttl, wait=0.0)
    with (
        Process(label, where, work=WORK) as first,
        Process(label, longer, work=2 * PATIENCE) as second,
        Process(label, once) as third,
    ):
        first.enters()
        second.go()
        time.sleep(5 * STEP)
        stopped = first.signal(signal.SIGSTOP)
        time.sleep(FREEZE)
        first.signal(signal.SIGCONT)
        _, outcome = first.next()
        entered, said = second.next()
        assert said == "in", (label, said)
        return outcome, third.enters() < float("inf"), entered - stopped


def row(label: str, url: str) -> str:
    package, store, _ = ADAPTERS[label]
    name = "".join(filter(str.isalnum, label))
    renewed, killed = long_body(label, Where(url, f"{name}1")), kill(label, Where(url, f"{name}2"))
    keeps = renewed > LONG - STEP
    outcome, frees, taken = freeze(label, Where(url, f"{name}3"), TTL if keeps else PATIENCE)
    cells = [
        f"{label.removesuffix(f', {store}')} {version(package)}",
        store,
        outcome,
        "**yes**" if frees else "no",
        "no" if taken > FREEZE else f"yes ({taken:.1f} s)",
        "yes" if keeps else f"**no** ({renewed:.1f} s)",
        f"{killed:.1f} s" if killed < PATIENCE else "never",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    chosen = [label for label in ADAPTERS if not sys.argv[1:] or any(word in label for word in sys.argv[1:])]
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        urls = {"file": folder, "sqlite": f"sqlite:///{folder}/locks.db"}
        for store, kind in SERVERS.items():
            urls[store] = stack.enter_context(kind()).url
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(lambda label: row(label, urls[ADAPTERS[label][1]]), chosen):
                print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(
            sys.argv[2], Where(sys.argv[3], sys.argv[4], float(sys.argv[5]), float(sys.argv[6])), float(sys.argv[7])
        )
    main()
