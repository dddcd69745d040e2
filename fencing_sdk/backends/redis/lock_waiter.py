"""One waiter in the line of one lock. What wakes it is told in `waiters.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fencing_sdk._values.claim import Claim, Grant
from fencing_sdk.abc import Tell
from fencing_sdk.backends.redis.channels import ListeningWaiter

_LONGEST_NAP = 60.0
"""Seconds between the tries of a waiter whose signs of life are answered."""


class RedisWaiter(ListeningWaiter):
    """
    A waiter in the line of one lock: the `fencing_sdk.abc.PlaceInLine` that `SupportsDirectGrant.stand` returns.

    Args:
        claim: What it waits for.

        ticket: Names it in messages.

        tag: The beginning of the lock's keys.

        tell: Called with news. None: it is woken, and never handed the lock.

        remove: Called when it leaves.
    """

    __slots__ = (
        "_remove",
        "asking",
        "direct",
        "due",
        "entering",
        "joined",
        "loop",
        "tell",
    )

    def __init__(
        self, claim: Claim, ticket: str, tag: str, tell: Tell | None, remove: Callable[[RedisWaiter], None]
    ) -> None:
        super().__init__(claim, ticket, tag)
        self._remove = remove
        self.direct = tell is not None
        """Whether it can be handed the lock."""
        self.tell: Tell = self._wake if tell is None else tell
        self.loop = asyncio.get_running_loop()
        self.due = self.loop.time()
        """When its next sign of life is to be given, by the clock of its event loop."""
        self.asking = False
        """Whether a sign of life is on its way."""
        self.joined = False
        """Whether the server knows it: its last sign of life was answered."""
        self.entering = False
        """Whether its caller waits until it has joined, and wants to know why not."""

    def nap(self, advice: float) -> float | None:  # noqa: ARG002  (the answers to signs of life are the better advice)
        """See `fencing_sdk.abc.PlaceInLine.nap`."""
        return _LONGEST_NAP if self.joined else None

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._remove(self)

    def let_go(self) -> None:
        """Tell the acquisition nothing more, and do not keep it: its task may hold anything, and the lease itself."""
        self.tell = _ignore

    def _wake(self, grant: Grant | None = None, age: float = 0.0) -> None:  # noqa: ARG002
        self.wake()


def _ignore(grant: Grant | None = None, age: float = 0.0) -> None:
    pass
