"""
The teaching pair: a store that believes every writer, and one that looks at the token.

Each is one resource with one value. Writes reach it as messages, so one can arrive late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name
from fencing_sdk._values.token_wire import check_token
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.guards._verdict import admitted
from fencing_sdk.testing._network import Network
from fencing_sdk.testing._timeline import Timeline


@dataclass(frozen=True, slots=True)
class Write:
    """A write that reached a store, and what became of it."""

    at: float
    """When it arrived, in seconds since the world began."""
    client: str
    value: object
    token: int
    accepted: bool


class Store(ABC):
    """One value that clients write. Made by `World.fenced_store` and `World.unfenced_store`."""

    def __init__(self, timeline: Timeline, network: Network, name: str) -> None:
        self.name = check_name(name)
        self.value: object = None
        """The value of the last write that was accepted."""
        self.history: list[Write] = []
        """Every write that arrived, accepted or refused, in order of arrival."""
        self._timeline = timeline
        self._network = network

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown(self.name)} value={shown(self.value)}>"

    async def write(self, value: object, token: int) -> None:
        """
        Send a write and wait until it is confirmed. Only code of a client can: see `WorldClient.run`.

        Raises:
            StaleTokenError: the store looks at tokens, and refused this one.
            ConfigurationError: *token* is not one.
        """
        checked = check_token(token)
        about = f"{shown(value)}, token {checked:d}"
        await self._network.here().ask(self.name, "write", about, lambda client: self._apply(client, value, checked))

    def _apply(self, client: str, value: object, token: Token) -> None:
        """Check and write, in one step: nothing can happen in between."""
        accepted = False
        try:
            self._admit(token)
            self.value = value
            accepted = True
        finally:
            self.history.append(Write(self._timeline.now, client, value, int(token), accepted))

    @abstractmethod
    def _admit(self, token: Token) -> None:
        """Refuse a write by raising `StaleTokenError`."""


class UnfencedStore(Store):
    """Accepts every write, as a disk or a plain HTTP service does. It records the token and ignores it."""

    def _admit(self, token: Token) -> None:
        """Believe it."""


class FencedStore(Store):
    """
    Refuses a token below the highest it has seen, and an equal one from another holder.

    The decision is that of every guard of this package, taken in one step with the write. And the
    store is a guard: ``fences=[store]`` raises its fence at acquisition for a lock that is named
    like the store, ``fences=[(store, store.name)]`` for any other.
    """

    def __init__(self, timeline: Timeline, network: Network, name: str) -> None:
        super().__init__(timeline, network, name)
        self._fence: Token | None = None

    @property
    def fence(self) -> int | None:
        """The highest token seen; None before the first."""
        return None if self._fence is None else int(self._fence)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`."""
        self._check_resource(resource)
        checked = check_token(token)
        await self._network.here().ask(self.name, "raise_to", f"token {checked:d}", lambda _: self._admit(checked))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        self._check_resource(resource)
        return self._fence

    def _admit(self, token: Token) -> None:
        self._fence = admitted(self.name, token, self._fence)

    def _check_resource(self, resource: str) -> None:
        if resource != self.name:
            msg = (
                f"the store {shown(self.name)} is one resource and not {shown(resource)}; name it like the lock, "
                f"or pass the pair: fences=[(store, store.name)]"
            )
            raise ConfigurationError(msg)
