"""
The value of a resource, replaced by revision: once, or never.

There are three outcomes of a replacement:

1. It is done.
2. Another write was first.
3. It is unknown, because an answer was lost or leaves it open. Then the value is read. Each write has a number of its
   own, which stands in the value. It tells whether the write was carried out, can still be, or never will be.

However late a request is carried out: its condition holds only as long as no other write was accepted.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.jitter import JITTER
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, shown
from fencing_sdk.guards.kahuna._layout import FencedValue, ForeignValueError
from fencing_sdk.guards.kahuna._requests import (
    GUARD,
    LATEST,
    KahunaValues,
    SetOutcome,
    StoredValue,
    UnreachedError,
)

__all__ = ["Pauses", "Replacement", "Revision", "read_revision"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25
_OLDER = 4
"""Revisions that are looked at below the present one, where the first write of a key may have been replaced at once."""


class Revision(NamedTuple):
    """What a resource has, and the revision of that; None and None if it has nothing yet."""

    value: FencedValue | None
    number: int | None

    def is_write(self, value: FencedValue) -> bool:
        """Whether this is the very write of *value*."""
        return self.value is not None and self.value.write == value.write


class Pauses:
    """The pauses between the tries of one call of the guard, and the end of them."""

    def __init__(self, limit: float) -> None:
        self._clock = BootClock()
        self._end = self._clock.now() + limit
        self._pause = _FIRST_PAUSE

    @property
    def over(self) -> bool:
        """Whether the call is to be given up."""
        return self._clock.now() > self._end

    async def sleep(self) -> None:
        """Wait for a moment, each time for a longer one."""
        await asyncio.sleep(self._pause * JITTER.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


async def read_revision(
    values: KahunaValues, operation: str, key: str, pauses: Pauses, number: int = LATEST, *, for_write: bool = True
) -> Revision:
    """
    Read what a resource has now, or at the revision *number*. Try again after no answer.

    A healthy server gives no answer to a read (MustRetry) while it replicates another write of the same value. Where
    no node can be reached, a write waits for one, and a read that is not *for_write* fails at once.

    Raises:
        BackendUnavailableError: no node has answered until the end of *pauses*.
        BackendRefusedError: another program has written the value.
    """
    while True:
        try:
            found = await values.get(operation, key, number)
        except BackendUnavailableError as error:
            if pauses.over or (isinstance(error, UnreachedError) and not for_write):
                raise
        else:
            return Revision(None, None) if found is None else _revision_of(operation, key, found)
        await pauses.sleep()


def _revision_of(operation: str, key: str, found: StoredValue) -> Revision:
    try:
        if not found.expires:  # the guard writes none that expires: the fence would go with it
            return Revision(FencedValue.read(found.value), found.revision)
    except ForeignValueError:
        pass
    detail = f"the value of {shown(key)} was written by another program; set another prefix"
    raise BackendRefusedError(GUARD, operation, detail)


class Replacement:
    """One write: *value* in the place of *before*."""

    def __init__(
        self,
        values: KahunaValues,
        operation: str,
        key: str,
        pauses: Pauses,
        *,
        before: Revision,
        value: FencedValue,
    ) -> None:
        self._values = values
        self._operation = operation
        self._key = key
        self._pauses = pauses
        self._before = before.number
        self._value = value
        self._doubtful = False
        """An earlier request of this write may have been carried out, or may still be."""

    async def run(self) -> bool:
        """
        Return whether it is done; False: another write was first, and this one never will be done.

        Raises:
            BackendUnavailableError: that is not known.
            BackendRefusedError: Kahuna rejects the request, and nothing was written.
        """
        while True:
            try:
                done = await self._try()
            except BackendRefusedError as error:
                if self._doubtful:
                    raise BackendUnavailableError(GUARD, self._operation, error.detail) from error
                raise
            if done is not None:
                return done
            if self._pauses.over:
                raise BackendUnavailableError(GUARD, self._operation, "no node says whether the value was written")
            await self._pauses.sleep()

    async def _try(self) -> bool | None:
        """Send the request; None: the outcome is unknown, and the same request may be sent again."""
        outcome = await self._values.replace(self._operation, self._key, self._before, self._value.to_bytes())
        if outcome is SetOutcome.DONE:
            return True
        if outcome is SetOutcome.NOT_SET and not self._doubtful:
            return False
        self._doubtful = True
        return await self._settle(await self._at(LATEST))

    async def _settle(self, present: Revision) -> bool | None:
        """
        Say by what is there whether the write was carried out.

        There are four cases:

        1. It is the write itself.
        2. It is what was there before: the write was not carried out, or not yet. (A node that is cut off may show
           an even older value.)
        3. It is the next revision, by another write: this one never will be carried out.
        4. It is a later one. An earlier revision shows this write, or the write that took its place.
        """
        if present.is_write(self._value):
            return True
        if present.number is None:
            return None
        if self._before is None:
            return await self._was_first(present.number)
        following = self._before + 1
        if present.number <= following:
            return False if present.number == following else None
        found = await self._at(following)
        if found.number is None:
            raise BackendUnavailableError(GUARD, self._operation, "the value was replaced before it could be read")
        return found.is_write(self._value)

    async def _was_first(self, present: int) -> bool:
        """Look for the first write of a key among the older revisions: nothing tells which number it would have."""
        oldest = max(0, present - _OLDER)
        for number in range(present - 1, oldest - 1, -1):
            found = await self._at(number)
            if found.number is None:
                break
            if found.is_write(self._value):
                return True
        else:
            if not oldest:
                return False
        raise BackendUnavailableError(GUARD, self._operation, "the value was replaced before it could be read")

    async def _at(self, number: int) -> Revision:
        return await read_revision(self._values, self._operation, self._key, self._pauses, number)
