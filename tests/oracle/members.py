"""The owners of a history, and their places in line."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Grant, Mode, Permit

MODE_OF: dict[str, Mode] = {"lock": LOCK, "writer": WRITER, "reader": READER, "permit": Permit(2), "wide": Permit(3)}
TTLS = (20.5, 60.5)


class Member:
    """One owner of a history: its claims one after the other, and its place in the line."""

    def __init__(self, label: str, play: int, *, described: bool) -> None:
        name, self.word = label.split("/")
        number = int(self.word[-1])
        self.label, self.name, self.client, self.mode = label, f"{play}-{name}", number % 2, MODE_OF[self.word[:-1]]
        self.ttl, self.metadata = TTLS[number // 2], label if number % 2 and described else None
        self.token = 0
        self.place: Place | None = None
        self.claim = self._claim()
        self.was_granted = False

    def _claim(self) -> Claim:
        return Claim(self.name, self.ttl, metadata=self.metadata, mode=self.mode)

    def new_claim(self) -> None:
        """Ask anew: an acquisition that is over is not made again."""
        self.claim, self.was_granted = self._claim(), False


class Place:
    """A place in a line, and the news of it."""

    def __init__(self, backend: Any, member: Member, news: list[tuple[Member, Grant | None]], *, direct: bool) -> None:
        self._backend, self._member, self._news = backend, member, news
        self._joined = asyncio.get_running_loop().create_future()
        self._direct = backend.stand(member.claim, self._tell) if direct else None
        self._task = None if direct else asyncio.create_task(self._stand())

    def _tell(self, grant: Grant | None = None, age: float = 0.0) -> None:
        self._news.append((self._member, grant))

    async def _stand(self) -> None:
        try:
            async with self._backend.queue(self._member.claim) as turn:
                self._joined.set_result(None)
                while True:
                    await turn.wait()
                    self._tell()
        except BaseException as error:
            if not self._joined.done():
                self._joined.set_exception(error)
            raise

    async def join(self) -> None:
        if self._direct is None:
            await self._joined

    async def leave(self, *, granted: bool) -> None:
        if self._direct is not None:
            self._direct.leave()
            if not granted:
                await self._backend.release(self._member.claim)
        elif self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
