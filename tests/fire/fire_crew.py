"""The workers: as many processes as there are places, each killed one replaced by a new one."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child_processes import end, spawn, state
from fire_network import Network, at_least
from patience import until

from fencing_sdk._recording import Recorder
from fencing_sdk._values.clock import BootClock

CLOCK = BootClock()
WORKER = Path(__file__).with_name("fire_worker.py")
START = 180.0
"""Seconds that a process may need until it has imported everything and opened its client."""


class Place:
    """One worker at a time, and the network that it has."""

    def __init__(self, number: int, network: Network, crew: Crew) -> None:
        self.number = number
        self.network = network
        self.actor = ""
        self.busy = False
        """Whether something is being done to its process."""
        self.cut = False
        """Whether something is being done to its network."""
        self.lived: list[tuple[float, float, str]] = []
        """From when to when which actor was here."""
        self._crew = crew
        self._born = 0.0
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def record(self) -> Path:
        return self._crew.folder / f"{self.actor}.jsonl"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> bool:
        return self.record.exists() and b'"ready"' in self.record.read_bytes()[:2000]

    def start(self) -> None:
        self._count += 1
        self.actor = f"w{self.number}.{self._count}"
        self._born = CLOCK.now()
        config = {
            **self._crew.config,
            "url": self._crew.url(self.network.ports),
            "record": str(self.record),
            "actor": self.actor,
            "seed": self._crew.random.randrange(2**32),
        }
        command = [sys.executable, str(WORKER), json.dumps(config)]
        self._process = spawn(command, folder=self._crew.folder, log=self._crew.folder / f"{self.actor}.log")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def actors(self, start: float, finish: float) -> list[str]:
        """Who was here between two moments."""
        lived = [*self.lived, (self._born, finish, self.actor)]
        return [actor for since, until, actor in lived if since <= finish and until >= start]

    async def freeze(self, seconds: float, until_true: Callable[[], bool] = lambda: True) -> bool:
        """SIGSTOP, and SIGCONT after *seconds*, or up to twice as late when something has become true."""
        assert self._process is not None
        pid, actor = self._process.pid, self.actor
        self._crew.recorder.record("frozen", actor=actor)
        self.signal(signal.SIGSTOP)
        await until(lambda: state(pid) in {"T", "Z", ""}, what="the worker stands still")
        stood = state(pid) == "T"
        await at_least(seconds, until_true)
        self.signal(signal.SIGCONT)
        self._crew.recorder.record("resumed", actor=actor)
        return stood

    async def kill(self) -> bool:
        """SIGKILL, and a new process in the same place."""
        assert self._process is not None
        self._crew.recorder.record("frozen", actor=self.actor)  # and never resumed
        await asyncio.to_thread(end, self._process, politely=False)
        killed = self._process.returncode == -signal.SIGKILL
        await self._replace()
        return killed

    async def dismiss(self) -> bool:
        """SIGTERM: it cancels its work, closes its client and is replaced."""
        left = await self.leave()
        await self._replace()
        return left

    async def leave(self) -> bool:
        """Let it end in good order."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        process = self._process
        await until(lambda: process.poll() is not None, what=f"{self.actor} leaves", within=60.0)
        return process.returncode == 0

    async def _replace(self) -> None:
        self.lived.append((self._born, CLOCK.now(), self.actor))
        self.start()
        await self.await_ready()

    async def await_ready(self) -> None:
        """Return when it works, or is dead."""
        stop = CLOCK.now() + START
        while self.alive and not self.ready:
            assert CLOCK.now() < stop, f"{self.actor} is not ready within {START} s"
            await asyncio.sleep(0.05)

    async def block(self) -> bool:
        """Something keeps the worker's main thread for a while."""
        return await self._provoke(signal.SIGUSR1, b'"blocked"')

    async def cancel(self) -> bool:
        """Somebody else cancels one of the worker's tasks."""
        return await self._provoke(signal.SIGUSR2, b'"outer": true')

    async def _provoke(self, number: signal.Signals, trace: bytes) -> bool:
        """Send a signal, and wait until what it does is in the worker's recording."""
        path = self.record
        known = path.stat().st_size
        self.signal(number)
        stop = CLOCK.now() + 10.0
        while CLOCK.now() < stop:
            with path.open("rb") as file:
                file.seek(known)
                if trace in file.read():
                    return True
            await asyncio.sleep(0.02)
        return False

    def close(self) -> None:
        if self._process is not None:
            end(self._process, politely=False)


class Crew:
    """Every place, and what all workers are told."""

    def __init__(
        self, store: Any, folder: Path, recorder: Recorder, chance: random.Random, config: dict[str, Any]
    ) -> None:
        self.url = store.url
        self.folder = folder
        self.recorder = recorder
        self.random = chance
        self.config = config
        self.places: list[Place] = []

    async def start(self, networks: Sequence[Network]) -> None:
        self.places = [Place(number, network, self) for number, network in enumerate(networks, start=1)]
        for place in self.places:
            place.start()
        await asyncio.gather(*(place.await_ready() for place in self.places))

    def free(self) -> list[Place]:
        """Those to whose process nothing is being done."""
        return [place for place in self.places if not place.busy]

    async def leave(self) -> list[str]:
        """Let everybody end in good order; who did not."""
        left = await asyncio.gather(*(place.leave() for place in self.places))
        return [place.actor for place, well in zip(self.places, left, strict=True) if not well]

    def close(self) -> None:
        for place in self.places:
            place.close()

    def log(self) -> str:
        """What workers wrote to their terminals: nothing, if all is well."""
        return "".join(
            f"--- {path.name}\n{text}" for path in sorted(self.folder.glob("w*.log")) if (text := path.read_text())
        )
