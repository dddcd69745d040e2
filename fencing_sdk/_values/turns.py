"""Who may send now: so many at once, the others in the order in which they asked, and those in a hurry first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turn", "Turns"]

Turn = asyncio.Future[None]
"""Done when the turn has come."""


class Turns:
    """
    The turns of one event loop.

    Args:
        most: How many may have a turn at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = most
        self._hurried: deque[Turn] = deque()
        self._others: deque[Turn] = deque()

    def take_at_once(self) -> bool:
        """Take a turn if one is free, and nothing waits for it."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    @property
    def idle(self) -> bool:
        """Whether every turn is free."""
        return self._free == self._most

    def ask(self, *, hurry: bool = False) -> Turn:
        """Ask for a turn; with *hurry*, before all that are in no hurry. It ends by `give_back`."""
        turn: Turn = asyncio.get_running_loop().create_future()
        if self.take_at_once():
            turn.set_result(None)
        else:
            (self._hurried if hurry else self._others).append(turn)
        return turn

    def give_back(self, turn: Turn | None = None) -> None:
        """End a turn, so that the next one begins; *turn* may be one that has not come yet."""
        if turn is not None and (turn.cancelled() or turn.cancel()):
            return
        for waiting in (self._hurried, self._others):
            while waiting:
                following = waiting.popleft()
                if not following.done():
                    following.set_result(None)
                    return
        self._free += 1

    def open_to_all(self) -> None:
        """Give a turn to all that wait."""
        for waiting in (self._hurried, self._others):
            for turn in waiting:
                if not turn.done():
                    self._free -= 1
                    turn.set_result(None)
            waiting.clear()

    @asynccontextmanager
    async def turn(self, *, hurry: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of a block."""
        turn = self.ask(hurry=hurry)
        try:
            await turn
            yield
        finally:
            self.give_back(turn)
