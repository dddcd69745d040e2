"""The owners of a history, and their places in line."""

from __future__ import annotations

import asyncio
from typing import Any

from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Grant, Mode, Permit
from fencing_sdk.backends._shared.waiters import KeptPlace

MODE_OF: dict[str, Mode] = {"lock": LOCK, "writer": WRITER, "reader": READER, "permit": Permit(2), "wide": Permit(3)}
TTLS = (20.5, 60.5)


class Member:
    """One owner of a history: its claims one after the other, and its place in the line."""

    def __init__(self, tag: str, play: int, *, described: bool) -> None:
        name, self.word = tag.split("/")
        number = int(self.word[-1])
        self.tag, self.name, self.client, self.mode = tag, f"{play}-{name}", number % 2, MODE_OF[self.word[:-1]]
        self.ttl, self.label = TTLS[number // 2], tag if number % 2 and described else None
        self.token = 0
        self.place: Place | None = None
        self.claim = self.make_claim()
        self.was_granted = False

    def make_claim(self) -> Claim:
        return Claim(self.name, self.ttl, label=self.label, mode=self.mode)

    def new_claim(self) -> None:
        """Ask anew: an acquisition that is over is not made again."""
        self.claim, self.was_granted = self.make_claim(), False


class Place:
    """A place in a line, and the news of it."""

    def __init__(self, backend: Any, member: Member, news: list[tuple[Member, Grant | None]], *, direct: bool) -> None:
        self._backend, self._member, self._news, self._direct = backend, member, news, direct
        self._place = backend.stand(member.claim, self._notify, hand_over=direct)

    def _notify(self, grant: Grant | None = None, age: float = 0.0) -> None:
        self._news.append((self._member, grant))

    async def join(self) -> None:
        while not self._direct and self._place.retry_after(1.0) is None:  # noqa: ASYNC110  (time stands still)
            await asyncio.sleep(0)
        if isinstance(self._place, KeptPlace):
            self._news.remove((self._member, None))  # that it has joined

    async def leave(self, *, granted: bool) -> None:
        if (leaving := self._place.leave()) is not None:
            await asyncio.wait((leaving,))
        if self._direct and not granted:
            await self._backend.release(self._member.claim)
