"""Play a script: the history it makes is the same every time, byte for byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fencing_sdk._values.timing import DRIFT, Timing
from fencing_sdk.testing._loop import never
from tests.simulation.judge import Report, check
from tests.simulation.mishaps import Mishaps
from tests.simulation.script import Script, Visit
from tests.simulation.stage import Actor, Stage, to_text
from tests.simulation.visits import Visitor

_SERVE = 12.0
"""Seconds besides two ttls within which every waiter is served after the last fault."""
_LATEST = 1.3
"""Part of a ttl by which a message may be late."""


@dataclass(frozen=True, slots=True)
class History:
    """What a script made, and what the checker says about it."""

    script: Script
    lines: list[dict[str, Any]]
    report: Report

    @property
    def text(self) -> str:
        """The recording as a file holds it."""
        return to_text(self.lines)


def play(script: Script) -> History:
    """Play *script* and check what it made."""
    stage = Stage(script)
    recording = stage.recording
    recording.record("run", "simulation", title=f"seed {script.seed}, {script.theme}", declared=True, **_rhythm(script))
    with _quiet(), stage.timeline.own_random():
        try:
            failures = _Run(stage).run()
        finally:
            recording.open = False
        failures += _end(stage)
    report = check(recording.lines)
    for failure in failures:
        report.found("P7", "failed", stage.now, f"{type(failure).__name__} in a task that is never awaited: {failure}")
    return History(script, recording.lines, report)


def _rhythm(script: Script) -> dict[str, float]:
    """The numbers by which promise P6 says how long a silence costs nothing."""
    timing = Timing.build(ttl=script.ttl, safety_buffer=script.safety_buffer)
    return {
        "safety_buffer": timing.safety_buffer,
        "heartbeat_interval": timing.heartbeat_interval,
        "drift": DRIFT,
    }


class _Run:
    """One run of a stage: the trouble, the healing, and a while in which everything has to settle."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._tasks: list[tuple[Actor, asyncio.Task[None]]] = []
        self._failures: list[BaseException] = []

    def run(self) -> list[BaseException]:
        """Let it all happen; return the errors that no code could catch."""
        stage, script = self._stage, self._stage.script
        mishaps = Mishaps(stage)
        for number, visit in enumerate(script.visits):
            stage.timeline.at(visit.at, self._begin, number, visit)
        self._let(script.horizon)
        mishaps.heal()
        within = 2 * script.ttl + _SERVE + sum(-fault.lasts for fault in script.faults if fault.lasts < 0)
        stage.recording.record("healed", "simulation", within=within)
        probe = Actor(stage, "probe", 1.0)
        modes = {visit.name: visit.mode for visit in script.visits}
        for name in script.names:
            mode = modes[name].replace("reader", "writer").replace("term", "lock")
            visit = Visit(0, stage.now, name, "write", 0.0, None, fenced=True, mode=mode)
            self._tasks.append((probe, probe.process.spawn(Visitor(stage, probe, visit).run())))
        self._let(stage.now + within + 1.0, until_served=True)
        arrived = max(stage.now + _LATEST * script.ttl, stage.kernel.network.latest)
        self._let(arrived + 1.1 * script.ttl)  # so long may a request that arrived at last keep the lock
        held = [name for name in script.names if stage.service.holder(name) is not None]
        stage.recording.record("end", "simulation", held=held)
        return self._failures

    def _let(self, until: float, *, until_served: bool = False) -> None:
        """Let time go on, past callbacks that fail."""
        timeline = self._stage.timeline
        stop = self._served if until_served else never
        while True:
            timeline.run(until, stop)
            if not timeline.failures:
                break
            self._failures += timeline.failures
            timeline.failures.clear()
        if not stop():
            timeline.now = max(timeline.now, until)

    def _served(self) -> bool:
        waiting = self._tasks
        while waiting and (waiting[-1][1].done() or waiting[-1][0].crashed):
            waiting.pop()
        return not waiting

    def _begin(self, number: int, visit: Visit) -> None:
        actor = self._stage.actors[visit.client]
        visitor = Visitor(self._stage, actor, visit)
        task = actor.process.spawn(visitor.run())
        self._tasks.append((actor, task))
        for fault in self._stage.script.faults:
            if fault.kind == "cancel" and fault.who == number:
                _cancel_after(self._stage, visitor, task, fault.turn)


def _cancel_after(stage: Stage, visitor: Visitor, task: asyncio.Task[None], turns: int) -> None:
    """Cancel between two turns of the loop: counted in turns, every await of a visit can be hit."""
    left = turns
    process = visitor.actor.process

    def turned() -> None:
        nonlocal left
        left -= 1
        if left < 0 or task.done():
            process.after_turn.pop(turned, None)
            if not task.done():
                visitor.cancelled = True
                stage.recording.record("cancelled", visitor.actor.name)
                task.cancel()

    process.after_turn[turned] = None


def _end(stage: Stage) -> list[BaseException]:
    """End the world; return the errors that no code could catch."""
    for actor in stage.actors:
        actor.process.resume()  # a process that crashed in the middle of a turn is not a failure
    stage.timeline.run(stage.now + 0.1)
    try:
        stage.kernel.end()
    except BaseExceptionGroup as group:
        return list(group.exceptions)
    except Exception as error:  # every error is a finding
        return [error]
    return []


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the engine logs about faults, thousands of which are meant, off the terminal."""
    logger = logging.getLogger("fencing_sdk")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
