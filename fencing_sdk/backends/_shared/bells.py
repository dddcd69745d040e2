"""The bells of one backend object, and the messages of a store that ring them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import lru_cache, partial

from fencing_sdk._values.claim import Claim, Gone, Place
from fencing_sdk.abc import Bell, News
from fencing_sdk.abc.line import Row

_MOMENT = 0.25
"""Seconds that a ticket holds before its client listens to its bell: most are given back sooner."""


@lru_cache(maxsize=1024)  # to listen asks, and so does the draw
def bell_key(owner: str) -> str:
    """Digest a secret *owner* into the 32 digits by which messages name its ticket: others may hear them too."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def message_for(row: Row) -> str:
    """Say that the ticket of a *row* holds."""
    return f"{bell_key(row.owner)} {row.token} {-1 if row.permit is None else row.permit} {row.number}"


def message_of_end(row: Row, reason: str) -> str:
    """Say that an operator has ended the ticket of a *row*."""
    return f"{bell_key(row.owner)} !{reason}"


class Bells:
    """Bells by the key of their owners."""

    def __init__(self) -> None:
        self._bells: dict[str, Bell] = {}

    def __bool__(self) -> bool:
        return bool(self._bells)

    def add(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """Ring *bell* for the ticket of *claim*, until the returned call is made."""
        return partial(self.drop, self.put(claim, bell))

    def add_and_listen(self, claim: Claim, bell: Bell, listen: Callable[[], object]) -> Callable[[], object]:
        """Do the same, and call *listen* in a moment, unless the returned call is made before."""
        key = self.put(claim, bell)
        timer = asyncio.get_running_loop().call_later(_MOMENT, listen, context=Context())

        def stop() -> None:
            timer.cancel()
            self.drop(key)

        return stop

    def put(self, claim: Claim, bell: Bell) -> str:
        """Ring *bell* for the ticket of *claim*, until the returned key is dropped."""
        key = bell_key(claim.owner)
        self._bells[key] = bell
        return key

    def drop(self, key: str) -> None:
        """Ring no more for this key."""
        self._bells.pop(key, None)

    def hear(self, message: str) -> None:
        """Ring for a *message*, which may come from anybody. One that is only a key says: look."""
        key, _, text = message.partition(" ")
        if (bell := self._bells.get(key)) is not None:
            bell(_news_in(text))

    def has(self, claim: Claim) -> bool:
        """Return whether there is a bell for the ticket of *claim*."""
        return bell_key(claim.owner) in self._bells

    def ring(self, owners: Iterable[str]) -> None:
        """Ring for the tickets of these *owners*, which have to look."""
        for owner in tuple(owners):
            self.hear(bell_key(owner))

    def ring_all(self) -> None:
        """Ring every bell: messages may have been lost."""
        for bell in tuple(self._bells.values()):
            bell(None)


def _news_in(text: str) -> News:
    if text.startswith("!"):
        return Gone(text[1:])
    try:
        token, permit, number = map(int, text.split(" "))
    except ValueError:
        return None
    return Place(token, permit if permit >= 0 else None, number)
