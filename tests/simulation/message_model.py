"""
What the models of the protocols share: clients that take steps, messages between them and the store, and the clock.

Messages wait for as long as they like, overtake each other and get lost; a grant expires by the clock. A model says
what its clients do where they are (``_idle``, ...) and what a message does when it arrives (``_on_release``, ...).
One step is one of these, or a tick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Step = tuple[str, Any]
"""What happens, and the state it leads to; or, as a text, the promise that it breaks."""
Message = tuple[object, ...]
"""What it is, and what `_on_` it gets."""


@dataclass(frozen=True, kw_only=True)
class MessageBounds:
    """How far the search goes: ticks of a ttl and of all, attempts of each client, messages on their way at once."""

    ttl: int = 2
    time: int = 4
    attempts: int = 1
    messages: int = 2
    loss: bool = True


class GrantRow(NamedTuple):
    """What the store knows: whose grant it is, its token, and when it ends."""

    who: int
    attempt: int
    token: int
    expires: int


class MessageModel:
    """The protocol, or a *broken* variant of it. A state is a named tuple with now, row, clients and messages."""

    start: Any

    def __init__(self, bounds: Any, broken: str = "") -> None:
        self.bounds = bounds
        self.broken = broken

    def steps(self, state: Any) -> Iterator[Step]:
        """Everything that can happen in *state*."""
        if state.now < self.bounds.time:
            yield "a tick", self._expire(state._replace(now=state.now + 1))
        for who, client in enumerate(state.clients):
            for what, after in getattr(self, f"_{client.at}")(state, who, client):
                yield f"c{who} {what}", after
        for message in sorted(state.messages, key=repr):
            rest = state._replace(messages=state.messages - {message})
            if self.bounds.loss:
                yield f"{message} is lost", rest
            for what, after in getattr(self, f"_on_{message[0]}")(rest, *message[1:]):
                yield f"{message}: {what}", after
        yield from self._left_behind(state)

    def _expire(self, state: Any) -> Any:
        over = state.row is not None and state.row.expires <= state.now
        return state._replace(row=None) if over else state

    def _become(self, state: Any, who: int, client: object, *messages: Message) -> Any:
        clients = tuple(client if other == who else old for other, old in enumerate(state.clients))
        return state._replace(clients=clients, messages=state.messages | set(messages))

    def _room(self, state: Any) -> bool:
        return bool(len(state.messages) < self.bounds.messages)

    def _left_behind(self, state: Any) -> Iterator[Step]:
        """Where nothing gets lost: once nothing is on its way, no grant is left to a client that wants nothing."""
        row = state.row
        if not self.bounds.loss and not state.messages and row is not None and not self._wants(state, row):
            yield "everything has arrived", "P5: a grant is left behind by a client that wants nothing"

    def _wants(self, state: Any, row: GrantRow) -> bool:
        """Whether the client that *row* names still wants the grant."""
        raise NotImplementedError
