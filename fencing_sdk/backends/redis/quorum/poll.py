"""Who holds a lock, by majority: the answers of the nodes to one question. No I/O but the wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter

from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.quorum.ballot import majority_of
from fencing_sdk.backends.redis.quorum.nodes import most_telling
from fencing_sdk.backends.redis.quorum.requests import SeenHold, read_hold

__all__ = ["Poll"]


class Poll:
    """
    The answers to one question.

    Args:
        nodes: The number of all nodes.

        asked: How many of them are asked.
    """

    def __init__(self, nodes: int, asked: int) -> None:
        self._majority = majority_of(nodes)
        self._left = asked
        self._seen: list[SeenHold | None] = []
        self._errors: list[Exception] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, _node: int, outcome: CallOutcome) -> None:
        """Take note of the answer of a node."""
        self._left -= 1
        try:
            if isinstance(outcome, Exception):
                raise outcome  # noqa: TRY301
            self._seen.append(read_hold(outcome))
        except Exception as error:  # noqa: BLE001
            self._errors.append(error)
        if (self._left == 0 or self._decided) and not self._done.done():
            self._done.set_result(None)

    @property
    def _most(self) -> tuple[tuple[str, int] | None, int]:
        """The owner and token that most nodes show, or None for "free", and how many nodes that is."""
        counts = Counter(None if seen is None else (seen.owner, seen.token) for seen in self._seen)
        return counts.most_common(1)[0] if counts else (None, 0)

    @property
    def _decided(self) -> bool:
        return self._most[1] >= self._majority

    async def result(self) -> SeenHold | None:
        """
        Wait for the answers; return the hold that a majority shows, or None if no owner has a majority.

        Raises:
            Exception: no majority has answered.
        """
        await self._done
        if len(self._seen) < self._majority:
            raise most_telling(self._errors)
        shown, count = self._most
        if shown is None or count < self._majority:
            return None
        holds = [seen for seen in self._seen if seen is not None and (seen.owner, seen.token) == shown]
        left = sorted((seen.left for seen in holds), reverse=True)[self._majority - 1]
        return SeenHold(*shown, left, holds[0].metadata)
