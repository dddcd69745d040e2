"""
Real nodes of a quorum under faults, with processes of clients, judged by `tests.simulation.judge`.

``uv run python tests/fire/quorum_fire.py --nodes 5 --minutes 10``. ``--clients published`` is the control: the same
faults on Redlock as published, whose tokens repeat and fall. ``--forgetful`` turns the append-only files off, so that
a killed node has lost its memory, and is admitted again. ``--clocks`` sets the clocks of nodes forward and back by
hours: then leases end early, so only tokens are judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

FIRE = Path(__file__).parent
sys.path[:0] = [path for path in map(str, (FIRE, FIRE.parent / "servers", FIRE.parent.parent)) if path not in sys.path]

from fault_proxy import FaultProxy  # noqa: E402
from fire_ports import kept  # noqa: E402
from redis_quorum import Quorum  # noqa: E402
from redis_server import RedisServer  # noqa: E402
from zookeeper_clock import WallClock  # noqa: E402

from tests.simulation.check import read_lines  # noqa: E402
from tests.simulation.judge import Report, Verdict, check  # noqa: E402

PROCESSES = 3
HOURS = 3600
LONGER = 10


class Clock:
    """A server program with a wall clock of its own."""

    def __init__(self, folder: Path, binary: str) -> None:
        folder.mkdir(parents=True)
        self._clock = WallClock(folder)
        self.program = str(folder / "redis-server")
        Path(self.program).write_text(f'#!/bin/sh\nexec {" ".join(self._clock.prefix)} {binary} "$@"\n')
        Path(self.program).chmod(0o755)

    def shift(self, seconds: int) -> None:
        self._clock.shift(seconds)


class QuorumFire:
    """One run: nodes, proxies before them, faults, and the processes of clients."""

    def __init__(
        self, folder: Path, *, nodes: int, forgetful: bool, clocks: bool, seed: int, binary: str = "redis-server"
    ) -> None:
        self.folder = folder
        self.forgetful = forgetful
        self.random = random.Random(seed)
        self.quorum = Quorum(nodes, binary=binary, appendonly=not forgetful, appendfsync="always")
        self.clocks = [Clock(folder / f"clock-{number}", binary) for number in range(nodes)] if clocks else []
        for node, clock in zip(self.quorum.nodes, self.clocks, strict=False):
            node.binary = clock.program
        self.proxies: list[FaultProxy] = []
        self.faults: Counter[str] = Counter()
        self._busy: set[int] = set()
        self._forgotten = asyncio.Lock()

    async def run(self, clients: str, seconds: float, *, enough: Callable[[Report], bool] = lambda _: True) -> Report:
        """
        Harm the nodes for *seconds* while clients work, and on until *enough* has happened.

        A busy machine grants less in the same time: a run that has not seen enough takes up to `LONGER` times as long.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.quorum)
            await self.quorum.init()
            self.proxies = [await stack.enter_async_context(FaultProxy(node.port)) for node in self.quorum.nodes]
            url = Quorum.url_at([proxy.port for proxy in self.proxies])
            async with self._workers(clients, url) as workers:
                await self._harm(seconds)
                for _ in range(LONGER - 1):
                    if not enough(self._judged()):
                        await self._harm(seconds)
                for worker in workers:
                    worker.stdin.close()
                await asyncio.gather(*(worker.wait() for worker in workers))
        return self._judged()

    def _judged(self) -> Report:
        """Judge each lock by itself. The last line of a process that is at work may be cut off."""
        raw = [line for log in self.folder.glob("worker-*.jsonl") for line in log.read_text().splitlines()]
        return check(read_lines([line for line in raw if line.endswith("}")], "the workers"))

    @contextlib.asynccontextmanager
    async def _workers(self, kind: str, url: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
        workers = []
        for number in range(PROCESSES):
            log, seed = self.folder / f"worker-{number}.jsonl", self.random.randrange(2**32)
            command = [sys.executable, str(FIRE / "quorum_worker.py"), kind, url, str(log), str(seed)]
            workers.append(await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE))
        try:
            yield workers
        finally:
            for worker in workers:
                if worker.returncode is None:
                    worker.kill()
                    await worker.wait()

    async def _harm(self, seconds: float) -> None:
        """Harm a minority of the nodes at any moment, and now and then one more."""
        kinds = [self._kill, self._freeze, self._slow, self._lose_replies, self._cut]
        if self.clocks:
            kinds.append(self._set_clock)
        running: set[asyncio.Task[None]] = set()
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(self.random.uniform(0.05, 0.4))
            most = self.quorum.majority if self.random.random() < 0.1 else self.quorum.majority - 1
            free = [number for number in range(len(self.quorum.nodes)) if number not in self._busy]
            if len(self._busy) < most and free:
                running.add(asyncio.create_task(self._on(self.random.choice(free), self.random.choice(kinds))))
        await asyncio.gather(*running)

    async def _on(self, number: int, harm) -> None:  # type: ignore[no-untyped-def]
        self._busy.add(number)
        try:
            await harm(number, self.random.choice((0.1, 0.3, 0.8, 2.0)))
            self.faults[harm.__name__.strip("_").replace("_", " ")] += 1
        finally:
            self._busy.discard(number)

    async def _kill(self, number: int, seconds: float) -> None:
        if not self.forgetful:
            await self._restart(self.quorum.nodes[number], seconds)
            return
        async with self._forgotten:  # else a majority may forget, and no node votes any more
            await self._restart(self.quorum.nodes[number], seconds)
            while True:
                with contextlib.suppress(Exception):
                    await self.quorum.init()
                    return
                await asyncio.sleep(0.1)

    @staticmethod
    async def _restart(node: RedisServer, seconds: float) -> None:
        await asyncio.to_thread(node.kill)
        with kept([node.port]):
            await asyncio.sleep(seconds)
            await asyncio.to_thread(node.start)

    async def _freeze(self, number: int, seconds: float) -> None:
        node = self.quorum.nodes[number]
        node.pause()
        await asyncio.sleep(seconds)
        node.resume()

    async def _slow(self, number: int, seconds: float) -> None:
        self.proxies[number].delay(requests=0.05, replies=self.random.choice((0.0, 0.2)))
        await asyncio.sleep(seconds)
        self.proxies[number].heal()

    async def _lose_replies(self, number: int, seconds: float) -> None:
        self.proxies[number].lose_replies(3, of=b"EVALSHA")
        await asyncio.sleep(seconds)
        self.proxies[number].heal()

    async def _cut(self, number: int, _seconds: float) -> None:
        self.proxies[number].cut()

    async def _set_clock(self, number: int, seconds: float) -> None:
        self.clocks[number].shift(self.random.choice((-5, -1, 1, 5)) * HOURS)
        await asyncio.sleep(seconds)
        self.clocks[number].shift(0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/fire/quorum_fire.py", description=__doc__)
    parser.add_argument("--nodes", type=int, choices=[3, 4, 5, 7], default=3)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", choices=["fenced", "published"], default="fenced")
    parser.add_argument("--forgetful", action="store_true")
    parser.add_argument("--clocks", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    heard = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if heard.seed is None else heard.seed
    with tempfile.TemporaryDirectory(prefix="quorum-fire-") as folder:
        fire = QuorumFire(Path(folder), nodes=heard.nodes, forgetful=heard.forgetful, clocks=heard.clocks, seed=seed)
        found = asyncio.run(fire.run(heard.clients, heard.minutes * 60))
    durable = not (heard.forgetful or heard.clocks)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(fire.faults.items()))
    sys.stdout.write(f"{heard.clients}, {heard.nodes} nodes, seed {seed}: {fire.faults.total()} faults: {faults}\n")
    broken = Counter(violation.rule for violation in found.violations)
    sys.stdout.write(f"{found.observed['acquisitions']} grants, broken: {dict(broken)}\n")
    held = found.of("P4") is Verdict.OK and (found.of("P1") is Verdict.OK or not durable)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
