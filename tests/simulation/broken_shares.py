"""Broken shares: permits and readers as stores and recipes have been found with, or as a first idea has them."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk._engine import acquisition
from fencing_sdk._lease_state import LeaseState
from fencing_sdk.abc import Claim, Permit
from fencing_sdk.abc.line import Line, Row
from tests.simulation.control import Change, Control
from tests.simulation.script import Script, Visit, write_share_script
from tests.simulation.stage import Resource

_draw = Line.draw
_settle = Line.settle


def _settling(change: Callable[[Line, Row, list[Row]], None]) -> Any:
    """`Line.settle` with a *change* to each ticket that begins to hold by it."""

    def settle(self, now):
        before = {owner for owner, row in self.rows.items() if row.token is not None}
        held = _settle(self, now)
        for row in held:
            if row.owner not in before:
                change(self, row, held)
        return held

    return settle


def _together(mode: str) -> Any:
    """Visits that hold together for a while, and nothing that goes wrong."""

    def aim(script: Script) -> Script:
        visits = tuple(
            replace(visit, name="a", mode=mode, at=0.1 * number, lasts=1.5, body="write", wait=None, fenced=False)
            for number, visit in enumerate(script.visits)
        )
        return replace(script, visits=visits, faults=(), horizon=8.0)

    return aim


def _readers_and_a_writer(script: Script) -> Script:
    """A writer that keeps its token for too long, and readers before and after it."""
    modes = ("reader", "writer", "reader", "reader")
    visits = tuple(
        Visit(number % script.clients, 0.2 * number, "a", "zombie", 0.5, None, fenced=True, mode=modes[number % 4])
        for number in range(8)
    )
    return replace(script, visits=visits, faults=())


def _one_permit_too_many() -> Iterable[Change]:
    """The store grants it, and the engine takes a permit of any number."""

    def draw(self, claim, now, **options):
        if claim.mode.word == "permit":
            claim = replace(claim, mode=Permit(claim.mode.of + 1))
        return _draw(self, claim, now, **options)

    yield Line, "draw", draw
    yield acquisition, "mistake_in", lambda _place, _mode: None


def _one_number_for_two() -> Iterable[Change]:
    def change(_line, row, _held):
        row.permit = None if row.permit is None else 0

    yield Line, "settle", _settling(change)


def _a_token_for_each_reader() -> Iterable[Change]:
    def change(line, row, _held):
        if row.mode.word == "reader":
            row.token = line.last = line.next_token(line.last)

    yield Line, "settle", _settling(change)


def _readers_told_apart() -> Iterable[Change]:
    yield Claim, "token_holder", lambda self, _token: self.holder


def _one_fence_for_the_pool() -> Iterable[Change]:
    yield LeaseState, "resource", lambda _self, name: name
    yield Resource, "of", lambda self, _lease: self


def _readers_beside_a_writer() -> Iterable[Change]:
    def draw(self, claim, now, **options):
        if claim.mode.word == "reader" and claim.owner not in self.rows:
            for row in [row for row in self.rows.values() if row.token is not None and not row.mode.shared]:
                del self.rows[row.owner]
        return _draw(self, claim, now, **options)

    yield Line, "draw", draw


def _the_phase_outlives_a_writer() -> Iterable[Change]:
    phases: dict[object, int] = {}

    def change(line, row, _held):
        if row.mode.word == "reader":
            row.token = phases.setdefault(line.next_token.__self__, row.token)

    yield Line, "settle", _settling(change)


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, write=write_share_script, **options)


CONTROLS = (
    _of("P1", "one permit too many", "too_many_permits", _one_permit_too_many, aim=_together("permit")),
    _of("P1", "one number for two permits", "two_grants overrun stale_read", _one_number_for_two,
        aim=_together("permit")),
    _of("P1", "readers beside a writer", "two_grants overrun stale_read", _readers_beside_a_writer,
        aim=_readers_and_a_writer),
    _of("P3", "a token for each reader", "holder_refused", _a_token_for_each_reader,
        aim=_together("reader")),
    _of("P3", "readers are told apart", "holder_refused", _readers_told_apart,
        aim=_together("reader")),
    _of("P3", "one fence for the pool", "holder_refused", _one_fence_for_the_pool,
        aim=_together("permit")),
    _of("P4", "the phase outlives a writer", "token_fell store_token_fell", _the_phase_outlives_a_writer,
        aim=_readers_and_a_writer),
)  # fmt: skip
