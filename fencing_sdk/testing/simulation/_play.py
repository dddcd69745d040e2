"""Play a script: the history it makes is the same every time, byte for byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fencing_sdk.testing.history import Report, check
from fencing_sdk.testing.simulation._mishaps import Mishaps
from fencing_sdk.testing.simulation._script import Script, Visit
from fencing_sdk.testing.simulation._stage import Actor, Stage
from fencing_sdk.testing.simulation._visits import Visitor

_SERVE = 12.0
"""Seconds besides two ttls within which everybody is served once nothing goes wrong any more."""
_LATEST = 1.3
"""Part of a ttl by which a message may be late."""


@dataclass(frozen=True, slots=True)
class History:
    """What a script made, and what the checker says about it."""

    script: Script
    lines: list[dict[str, Any]]
    text: str
    report: Report


def play(script: Script) -> History:
    """Play *script* and check what it made."""
    with _quiet():
        stage = Stage(script)
        recording = stage.recording
        recording.tell("run", "simulation", title=f"seed {script.seed}, {script.theme}", declared=True)
        try:
            _run(stage)
        finally:
            recording.open = False
        failures = _end(stage)
    report = check(recording.lines)
    for failure in failures:
        report.found("P7", "failed", stage.now, f"{type(failure).__name__} in a task that nobody waits for: {failure}")
    return History(script, recording.lines, recording.text(), report)


def _run(stage: Stage) -> None:
    script, timeline = stage.script, stage.timeline
    mishaps = Mishaps(stage)
    tasks: list[tuple[Actor, asyncio.Task[None]]] = []
    for number, visit in enumerate(script.visits):
        timeline.at(visit.at, _begin, stage, number, visit, tasks)
    timeline.run(script.horizon)
    mishaps.heal()
    within = 2 * script.ttl + _SERVE + sum(-fault.lasts for fault in script.faults if fault.lasts < 0)
    stage.recording.tell("healed", "simulation", within=within)
    probe = Actor(stage, "probe", 1.0)
    for name in script.names:
        visit = Visit(0, timeline.now, name, "write", 0.0, None, fenced=True)
        tasks.append((probe, probe.process.spawn(Visitor(stage, probe, visit).run())))
    timeline.run(timeline.now + within + 1.0, lambda: all(task.done() or actor.crashed for actor, task in tasks))
    timeline.run(timeline.now + (_LATEST + 1.1) * script.ttl)
    held = [name for name in script.names if stage.service.holder(name) is not None]
    stage.recording.tell("end", "simulation", held=held)


def _begin(stage: Stage, number: int, visit: Visit, tasks: list[tuple[Actor, asyncio.Task[None]]]) -> None:
    actor = stage.actors[visit.client]
    visitor = Visitor(stage, actor, visit)
    task = actor.process.spawn(visitor.run())
    tasks.append((actor, task))
    for fault in stage.script.faults:
        if fault.kind == "cancel" and fault.who == number:
            _cancel_after(stage, visitor, task, fault.turn)


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
                stage.recording.tell("cancelled", visitor.actor.name)
                task.cancel()

    process.after_turn[turned] = None


def _end(stage: Stage) -> list[BaseException]:
    """End the world; return what failed and was nobody's to catch."""
    try:
        stage.kernel.end()
    except BaseExceptionGroup as group:
        return list(group.exceptions)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
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
