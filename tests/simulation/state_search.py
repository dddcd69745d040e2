"""Every state that a model can reach, nearest first, and the shortest way to one that breaks a promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

S = TypeVar("S", bound=Hashable)


class Explorable(Protocol[S]):
    """A model: where it begins, and what can happen in a state. A step into a str breaks the promise that it names."""

    @property
    def start(self) -> S: ...

    def steps(self, state: S) -> Iterator[tuple[str, S | str]]: ...


@runtime_checkable
class Finite(Protocol):
    """A model whose clients want to come to an end: from every state there must be a way to one that is ``done``."""

    def done(self, state: object) -> bool: ...


class Outcome(NamedTuple):
    states: int
    exhausted: bool
    broken: str = ""
    way: tuple[str, ...] = ()
    """The shortest way to the broken promise."""


def explore(model: Explorable[S], limit: int) -> Outcome:
    """Visit every state once, nearest first; stop at a broken promise, or after *limit* states."""
    came: dict[S, tuple[S, str] | None] = {model.start: None}
    before: dict[S, list[S]] = {}
    queue = deque(came)
    while queue:
        state = queue.popleft()
        for what, after in model.steps(state):
            if isinstance(after, str):
                return Outcome(len(came), False, after, (*_way(came, state), what))
            before.setdefault(after, []).append(state)
            if after not in came:
                if len(came) >= limit:
                    return Outcome(len(came), False)
                came[after] = (state, what)
                queue.append(after)
    if isinstance(model, Finite) and (stuck := _without_an_end(model, came, before)) is not None:
        return Outcome(len(came), False, "no way leads to an end", _way(came, stuck))
    return Outcome(len(came), True)


def _without_an_end(model: Finite, came: dict[S, tuple[S, str] | None], before: dict[S, list[S]]) -> S | None:
    """The nearest state from which the model cannot come to an end any more."""
    queue = deque(state for state in came if model.done(state))
    ending = set(queue)
    while queue:
        for state in before.get(queue.popleft(), ()):
            if state not in ending:
                ending.add(state)
                queue.append(state)
    return next((state for state in came if state not in ending), None)


def _way(came: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    way: list[str] = []
    while (before := came[state]) is not None:
        state, what = before
        way.append(what)
    return tuple(reversed(way))
