"""
The waiters of one client: their places in the lines, and how they are woken.

The server keeps the line of every lock; whoever frees a lock wakes the head of its line, and nobody else, by NOTIFY
on the channel of the head's client, with the head's word. Every client has one channel for everything, and one
connection that listens to it while somebody waits.

A message may get lost with its connection. So whoever waits tries again once a second, and at once when a connection
was opened anew; where nothing is heard at all, four times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.postgresql._calls import Calls
from fencing_sdk.backends.postgresql._dial import Dialer
from fencing_sdk.backends.postgresql._ears import Ears
from fencing_sdk.backends.postgresql._link import Link

_HEARING = 1.0
"""Seconds that whoever joins waits for the client's ears; afterwards it is woken when they hear."""

_LEAVE_TRIES = 2
"""One for the connection that is open, and one for the next if that was broken."""


class Place:
    """A place in the line of one lock."""

    __slots__ = ("_woken", "channel", "claim", "served", "word")

    def __init__(self, claim: Claim, channel: str, word: str) -> None:
        self.claim = claim
        self.channel = channel
        self.word = word
        self.served = False
        self._woken = WakeUp()

    def wake(self) -> None:
        """Another try may succeed."""
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()


class Line:
    """Everybody who waits by way of one backend."""

    def __init__(self, link: Link, dialer: Dialer, calls: Calls) -> None:
        self._link = link
        self._calls = calls
        self._ears = Ears(dialer, self._notify, self)
        self._words = itertools.count(1)
        self._places: dict[tuple[str, str], Place] = {}
        self._by_word: dict[str, Place] = {}

    @property
    def occupied(self) -> bool:
        """See `fencing_sdk.backends.postgresql._ears.Listener`."""
        return bool(self._places)

    @property
    def deaf(self) -> bool:
        """Whether nobody can be woken."""
        return self._ears.deaf

    def place(self, claim: Claim) -> Place | None:
        """Where *claim* stands."""
        return self._places.get((claim.name, claim.owner)) if self._places else None

    async def stand(self, claim: Claim) -> Place:
        """Stand in the line of a lock until `leave`, with an ear at the channel if that can be had."""
        key = (claim.name, claim.owner)
        self._places[key] = place = Place(claim, "", str(next(self._words)))
        self._by_word[place.word] = place
        try:
            self._ears.open()
            place.channel = self._ears.channel
            await self._link.ask(self._calls.join, (claim.name, claim.owner, place.channel, place.word))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARING):
                    await self._ears.tried()
        except BaseException:
            await self.leave(place)
            raise
        return place

    async def leave(self, place: Place) -> None:
        """
        Leave, unless the lock was granted.

        Raises no error, which would replace the cancellation that ends the wait.
        """
        claim = place.claim
        self._places.pop((claim.name, claim.owner), None)
        self._by_word.pop(place.word, None)
        for _ in range(0 if place.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):  # in vain: who gives no signs of life is passed over
                # Not urgent: it must not overtake a try of the same waiter, which would stand in line again.
                await self._link.ask(self._calls.leave, (claim.name, claim.owner), surely=True)
                return

    def hear(self, word: str) -> None:
        """Wake whom a message is for."""
        if (place := self._by_word.get(word)) is not None:
            place.wake()

    def wake_everybody(self) -> None:
        """Let everybody try who may have missed a message."""
        for place in tuple(self._places.values()):
            place.wake()

    async def _notify(self, channel: str, word: str) -> object:
        return await self._link.ask(self._calls.notify, (channel, word))

    async def aclose(self) -> None:
        """Stop listening."""
        await self._ears.aclose()
