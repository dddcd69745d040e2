"""
Negative controls: broken variants of the engine, the store and the resource, each of which has to be caught.

A checker that never found a real violation proves nothing. A control breaks one thing for as long as
its block lasts. It names the promise, the rules that have to find the break, and the number of seeds
within which they have to. A change to the simulation or the checker that loses one fails the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.script import Script, write_script

Change = tuple[object, str, Any]
"""An owner, the name of one of its attributes, and what replaces it."""


@dataclass(frozen=True, slots=True)
class Control:
    """One broken variant."""

    name: str
    promise: str
    rules: frozenset[str]
    changes: Callable[[], Iterable[Change]]
    themes: tuple[str, ...] = ()
    """Themes whose seeds are played. All by default."""
    aim: Callable[[Script], Script] = field(default=lambda script: script)
    """Faults added where chance would take too long to hit."""
    write: Callable[[int], Script] = write_script
    within: int = 60
    """Seeds by which it has to be caught."""

    @staticmethod
    def nothing() -> Iterable[Change]:
        """Break nothing: the script alone does what no store survives."""
        return ()

    def scripts(self) -> Iterator[Script]:
        """The scripts to play, first to last."""
        seed = played = 0
        while played < self.within:
            script = self.write(seed)
            seed += 1
            if not self.themes or script.theme in self.themes:
                played += 1
                yield self.aim(script)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Break it."""
        with ExitStack() as stack:
            for owner, name, new in self.changes():
                stack.enter_context(_replaced(owner, name, new))
            yield


@contextmanager
def _replaced(owner: object, name: str, new: object) -> Iterator[None]:
    old = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)
