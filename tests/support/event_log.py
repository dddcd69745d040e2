"""The events of a client, kept for a test to wait for and to look at, and the clock that dates them."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from inside import BootClock
from patience import until

from fencing_sdk import LossReason
from fencing_sdk.events import Event

E = TypeVar("E", bound=Event)

CLOCK = BootClock()
ENDED_BY_TIME = {LossReason.EXPIRED, LossReason.STALLED}
"""A busy machine makes the loop late by itself; which of the two it was is not what these tests are about."""


class Log:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def seen(self, kind: type[E], count: int = 1) -> E:
        """Wait for the *count*-th event of *kind* and return it."""
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]


async def ticks(count: int) -> None:
    """Let the event loop turn *count* times."""
    for _ in range(count):
        await asyncio.sleep(0)
