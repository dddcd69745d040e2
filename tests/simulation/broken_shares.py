"""Broken shares: permits and readers as stores and recipes have been found with, or as a first idea has them."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk._engine import acquisition
from fencing_sdk._lease_state import LeaseState
from fencing_sdk.abc import Claim
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_table import RowTable
from tests.simulation.control import Change, Control
from tests.simulation.script import Script, Visit, write_share_script
from tests.simulation.stage import Resource

_grant = rules.grant


def _row_of(rows: Any, claim: Claim) -> Any:
    return next(row for row in rows.grants() if row.owner == claim.owner)


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

    def fits(mode, held):
        return {other.word for other in held} == {mode.word}

    def grant(rows, claim):
        held = rows.grants()
        if claim.mode.word == "permit" and len(held) >= claim.mode.of:
            claim = replace(claim, mode=replace(claim.mode, of=len(held) + 1))
        return _grant(rows, claim)

    yield rules, "fits", fits
    yield rules, "grant", grant
    yield acquisition, "mistake_in", lambda _grant, _mode: None


def _one_number_for_two() -> Iterable[Change]:
    def grant(rows, claim):
        answer = _grant(rows, claim)
        if claim.mode.word != "permit":
            return answer
        _row_of(rows, claim).permit = 0
        return replace(answer, permit=0)

    yield rules, "grant", grant


def _a_token_for_each_reader() -> Iterable[Change]:
    def grant(rows, claim):
        answer = _grant(rows, claim)
        if claim.mode.word != "reader":
            return answer
        row = _row_of(rows, claim)
        row.token = rows.next_token()
        rows.add(row)
        return replace(answer, token=row.token)

    yield rules, "grant", grant


def _readers_told_apart() -> Iterable[Change]:
    yield Claim, "token_holder", lambda self, _token: self.holder


def _one_fence_for_the_pool() -> Iterable[Change]:
    yield LeaseState, "resource", lambda _self, name: name
    yield Resource, "of", lambda self, _lease: self


def _readers_beside_a_writer() -> Iterable[Change]:
    def acquire(self, claim, now):
        if claim.mode.word == "reader" and any(not row.mode.shared for row in self.grants.get(claim.name, {}).values()):
            del self.grants[claim.name]
        return _acquire(self, claim, now)

    _acquire = RowTable.acquire
    yield RowTable, "acquire", acquire


def _the_phase_outlives_a_writer() -> Iterable[Change]:
    phases: dict[tuple[Any, str], int] = {}

    def grant(rows, claim):
        answer = _grant(rows, claim)
        if claim.mode.word != "reader":
            return answer
        token = phases.setdefault((rows.table, claim.name), answer.token)
        _row_of(rows, claim).token = token
        return replace(answer, token=token)

    yield rules, "grant", grant


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
