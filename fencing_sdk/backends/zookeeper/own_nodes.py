"""The nodes of this backend object: each is a waiter in the line of a lock, or a grant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fencing_sdk._values.claim import LOCK, Claim
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession

__all__ = ["Key", "OwnNode", "OwnNodes", "key_of"]

Key = tuple[str, str]
"""Name and owner of a claim."""

_CLOCK = BootClock()


def key_of(claim: Claim) -> Key:
    """The key of a claim among the nodes."""
    return claim.name, claim.owner


@dataclass(eq=False, slots=True)
class OwnNode:
    """One node, and how long it counts."""

    claim: Claim
    session: ZooKeeperSession
    path: str
    token: int
    born: int
    """The transaction that created the node. A node of the same path may be another one."""
    permit: int | None = None
    """The number of the permit, where the grant is one."""
    ends_at: float | None = None
    """When the grant ends if it is not renewed. None while the node is a waiter."""
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
        """Whether this is a grant that has not ended."""
        return not self.over and self.ends_at is not None and _CLOCK.now() < self.ends_at

    @property
    def surely_there(self) -> bool:
        """
        Whether the node is watched, and no event has come.

        ZooKeeper sends the event of a watched node before it answers any later request on that connection.
        """
        return self.watched_on == self.session.connections

    def renew(self) -> None:
        """Let the grant last for a whole ttl from now on, unless the driver's thread has given the node up."""
        self.ends_at = _CLOCK.now() + self.claim.ttl
        if not self.session.ends.prolong(self.path, self.claim.ttl):
            self.finish()

    @property
    def left(self) -> float:
        """Seconds until the grant ends."""
        return 0.0 if self.ends_at is None else self.ends_at - _CLOCK.now()

    def finish(self) -> None:
        """End it: it is never renewed again."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class OwnNodes:
    """All nodes of one backend object, and the order of the calls about each of them."""

    def __init__(self) -> None:
        self._nodes: dict[Key, OwnNode] = {}
        self._locks: Counter[str] = Counter()
        """By name: how many of them are nodes of locks, not of shares."""
        self._turns: dict[Key, tuple[asyncio.Lock, list[None]]] = {}

    def get(self, key: Key) -> OwnNode | None:
        """The node of a claim."""
        return self._nodes.get(key)

    def put(self, own_node: OwnNode) -> None:
        """Enter *own_node*."""
        key = key_of(own_node.claim)
        if key not in self._nodes and own_node.claim.mode is LOCK:
            self._locks[own_node.claim.name] += 1
        self._nodes[key] = own_node

    def any_lock(self, name: str) -> bool:
        """Whether a node of this object is in the line of a lock, so that no later one is granted before it."""
        return name in self._locks

    def drop(self, own_node: OwnNode) -> None:
        """Forget *own_node*, but not a later one of the same claim."""
        own_node.finish()
        if self._nodes.get(key_of(own_node.claim)) is own_node:
            del self._nodes[key_of(own_node.claim)]
            if own_node.claim.mode is LOCK:
                self._locks -= Counter((own_node.claim.name,))

    def of(self, session: ZooKeeperSession) -> list[OwnNode]:
        """The nodes that *session* keeps alive."""
        return [own_node for own_node in self._nodes.values() if own_node.session is session]

    def all(self) -> Iterable[OwnNode]:
        """All of them."""
        return list(self._nodes.values())

    def clear(self) -> None:
        """Forget all of them: in a forked child they are the parent's."""
        self._nodes.clear()
        self._locks.clear()
        self._turns.clear()

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """Let one call about a claim run at a time: a retry must not overlap with the first try."""
        lock, users = self._turns.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users and self._turns.get(key) == (lock, users):
                del self._turns[key]
