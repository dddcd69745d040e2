"""What this backend has in the line of each lock: a place of a waiter, or a grant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.zookeeper._session import Session

__all__ = ["Key", "Stake", "Stakes", "key_of"]

Key = tuple[str, str]
"""Name and owner."""

_CLOCK = BootClock()


def key_of(claim: Claim) -> Key:
    return claim.name, claim.owner


@dataclass(eq=False, slots=True)
class Stake:
    """A node of ours, and since when and for how long it counts."""

    claim: Claim
    session: Session
    path: str
    token: int
    born: int
    """The transaction that created the node. A node of the same path may be another one."""
    ends_at: float | None = None
    """When the grant ends if it is not renewed. None while it is a place in the line."""
    over: bool = False
    """Released, expired or lost: never to be renewed again, even if the node is still there."""
    woken: WakeUp = field(default_factory=WakeUp)
    watched_on: int = 0
    """The connection of the session on which the node itself is watched; 0 when it is not."""
    watched: str = ""
    """The path of the node ahead that is watched."""
    timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> bool:
        """Whether this is a grant that counts. One that is past its end counts no more, noticed or not."""
        return not self.over and self.ends_at is not None and _CLOCK.now() < self.ends_at

    @property
    def surely_there(self) -> bool:
        """
        Whether the node is watched, and nothing was heard.

        ZooKeeper tells of a watched node before it answers what was asked later on that connection.
        """
        return self.watched_on == self.session.connections

    def renew(self) -> None:
        """Let it last for a whole ttl, from now on."""
        self.ends_at = _CLOCK.now() + self.claim.ttl

    @property
    def left(self) -> float:
        """Seconds until it ends."""
        return 0.0 if self.ends_at is None else self.ends_at - _CLOCK.now()

    def finish(self) -> None:
        """Let it never be renewed again."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Stakes:
    """Every stake of one backend, and the order in which calls about one of them are made."""

    def __init__(self) -> None:
        self._stakes: dict[Key, Stake] = {}
        self._turns: dict[Key, tuple[asyncio.Lock, list[None]]] = {}

    def get(self, key: Key) -> Stake | None:
        return self._stakes.get(key)

    def put(self, stake: Stake) -> None:
        self._stakes[key_of(stake.claim)] = stake

    def drop(self, stake: Stake) -> None:
        """Forget *stake*, unless there is another one of that key meanwhile."""
        stake.finish()
        if self._stakes.get(key_of(stake.claim)) is stake:
            del self._stakes[key_of(stake.claim)]

    def of(self, session: Session) -> list[Stake]:
        return [stake for stake in self._stakes.values() if stake.session is session]

    def all(self) -> Iterable[Stake]:
        return list(self._stakes.values())

    def clear(self) -> None:
        self._stakes.clear()
        self._turns.clear()

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """One call about a claim at a time: a retry must not meet the first try half way."""
        lock, users = self._turns.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users and self._turns.get(key) == (lock, users):
                del self._turns[key]
