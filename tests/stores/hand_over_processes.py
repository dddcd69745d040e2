"""Hand-overs between real processes: two or three resume each ticket at once, and some are killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from worker_processes import WORKERS, WorkerProcess, worker_processes

TTL = 0.8
KEEP = 5.0
WORKER = WORKERS / "hand_over_worker.py"
KILLED, STOPPED = 0.035, 0.06
"""Share of the hand-overs in which a process is killed, and in which one is killed or stopped."""


class Campaign:
    """
    Hand-overs of one lock.

    Args:
        url: The store.

        folder: For the file of uses; empty.

        seed: Of the faults and their moments.

        broken: The control: a ticket is adopted without a new owner.
    """

    def __init__(self, url: str, folder: Path, *, seed: int, broken: bool = False) -> None:
        self.url, self.uses, self.broken = url, folder / "uses", broken
        self.dice = random.Random(seed)
        self.handed = self.double = 0
        self.faults: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    async def play(self, count: int) -> None:
        """Hand over *count* times, or until the control is caught."""
        async with worker_processes() as start:
            workers = await asyncio.gather(*(self._started(start) for _ in range(4)))
            ticket = "-"
            while self.handed < count and not (self.broken and self.is_caught):
                chosen = self.dice.sample(workers, 1 if ticket == "-" else self.dice.choice([2, 2, 3]))
                for worker in chosen:
                    await self._order(worker, ticket)
                killed = await self._strike(chosen) if len(chosen) > 1 else None
                answers = await asyncio.gather(*(worker.says() for worker in chosen))
                winners = [answer[1] for answer in answers if answer[:1] == ["detached"]]
                self.refusals.update(answer[1] for answer in answers if answer[:1] in (["refused"], ["failed"]))
                self.handed += bool(winners) and ticket != "-"
                self.double += len(winners) > 1
                ticket = winners[0] if winners else "-"
                for worker, answer in zip(chosen, answers, strict=True):
                    assert answer or worker is killed, "a worker has ended by itself"
                if killed is not None:
                    await killed.kill()
                    workers[workers.index(killed)] = await self._started(start)

    async def _started(self, start: Callable[..., Awaitable[WorkerProcess]]) -> WorkerProcess:
        worker = await start(WORKER, self.url, self.uses, TTL, "adopt" if self.broken else "sound")
        await worker.says("ready")
        return worker

    async def _order(self, worker: WorkerProcess, ticket: str) -> None:
        assert worker.process.stdin is not None
        worker.process.stdin.write(f"{self.dice.uniform(0.0, 0.03)} {KEEP} {ticket}\n".encode())
        await worker.process.stdin.drain()

    async def _strike(self, chosen: list[WorkerProcess]) -> WorkerProcess | None:
        """Kill or stop one of them now and then; return the one that was killed."""
        deed = self.dice.random()
        if deed >= STOPPED:
            return None
        victim = self.dice.choice(chosen)
        await asyncio.sleep(self.dice.uniform(0.0, 0.05))
        if deed < KILLED:
            self.faults["killed"] += 1
            victim.process.kill()
            return victim
        self.faults["stopped"] += 1
        victim.stop()
        pause = self.dice.uniform(0.3, 2.5) * TTL
        asyncio.get_running_loop().call_later(pause, _go_on, victim.process.pid)
        return None

    @property
    def is_caught(self) -> bool:
        """True if two have gone on with one ticket."""
        return self.double > 0 or any(self.faults_in_uses()[1:])

    def faults_in_uses(self) -> tuple[int, int, int]:
        """Return how many uses there were, how many of a token below a later one, and how many of a shared one."""
        lines = [line.split() for line in self.uses.read_text().splitlines()] if self.uses.exists() else []
        below = shared = highest = 0
        users: dict[int, str] = {}
        for _, number, process in sorted(lines, key=lambda line: float(line[0])):
            token = int(number)
            below += token < highest
            shared += users.setdefault(token, process) != process
            highest = max(highest, token)
        return len(lines), below, shared


def _go_on(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, signal.SIGCONT)
