"""Broken elections and drains: what would happen if a term, or the end of a client, did not wait for the body."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from fencing_sdk._engine.draining import Draining
from fencing_sdk._lease import state_of
from fencing_sdk.recipes import election
from fencing_sdk.recipes.election import TermBlock
from tests.simulation.aims import cut_off
from tests.simulation.control import Change, Control
from tests.simulation.script import write_election_script

_begin = Draining.begin
_enter_with = vars(election)["enter_with"]
_leave = TermBlock.leave


def _term_goes_on() -> Iterable[Change]:
    def enter_with(lock, lease):
        _enter_with(lock, lease)
        state_of(lease).forget_scope()

    yield election, "enter_with", enter_with


def _drained_at_once() -> Iterable[Change]:
    def begin(self, within):
        _begin(self, within)
        for lease in tuple(self.releases.unreleased.values()):
            lease.forget_scope()
            self.releases.release_behind(lease)

    yield Draining, "begin", begin


def _stopped_at_once() -> Iterable[Change]:
    def stop(self):
        self.stopped = True
        self.lease._state.keeper._releases.release_behind(self.lease._state)

    yield TermBlock, "stop", stop


def _all_swallowed() -> Iterable[Change]:
    async def leave(self, raised, traceback):
        with contextlib.suppress(Exception):
            await _leave(self, raised, traceback)
        return True

    yield TermBlock, "leave", leave


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, write=write_election_script, **options)


CONTROLS = (
    _of("P1", "a term goes on after its loss", "overrun", _term_goes_on, themes=("network",), aim=cut_off),
    _of("P1", "a drain releases before the body has ended", "overrun stale_read", _drained_at_once),
    _of("P1", "a term that is stopped releases before its body has ended", "overrun stale_read", _stopped_at_once),
    _of("P7", "a term swallows every error", "wrong_error", _all_swallowed),
)
