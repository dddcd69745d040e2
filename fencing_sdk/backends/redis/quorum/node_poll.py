"""One question to the nodes of a quorum, and what a majority of their answers shows. No I/O but the wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.quorum.acquire_ballot import majority_of
from fencing_sdk.backends.redis.quorum.node import SILENCE, NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, most_telling
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests, SeenHold, read_hold
from fencing_sdk.backends.redis.scripts import ScriptCall

__all__ = ["Poll", "ask_nodes", "find_hold", "is_decided", "shown_by_majority"]

T = TypeVar("T")


class Poll(Generic[T]):
    """
    The answers to one question.

    Args:
        nodes: The number of all nodes.

        asked: How many of them are asked.

        read: Reads a reply. It raises ValueError or TypeError for one that is no answer.

        enough: Whether these answers of a majority say it all. Else the others are awaited for `SILENCE` seconds.
    """

    def __init__(
        self, nodes: int, asked: int, read: Callable[[Reply], T], enough: Callable[[Collection[T]], bool]
    ) -> None:
        self._majority = majority_of(nodes)
        self._left = asked
        self._read = read
        self._enough = enough
        self._answers: dict[int, T] = {}
        self._errors: list[Exception] = []
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, node: int, outcome: CallOutcome) -> None:
        """Take note of the answer of a node."""
        if self._done.done():
            return
        self._left -= 1
        try:
            if isinstance(outcome, Exception):
                raise outcome  # noqa: TRY301
            self._answers[node] = self._read(outcome)
        except Exception as error:  # noqa: BLE001
            self._errors.append(error)
        heard = len(self._answers) >= self._majority
        if self._left == 0 or (heard and self._enough(self._answers.values())):
            self._end()
        elif heard and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SILENCE, self._end)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._done.set_result(None)

    async def result(self) -> Mapping[int, T]:
        """
        Wait for the answers; return those that came in time, by node: a majority at the least.

        Raises:
            Exception: no majority has answered.
        """
        await self._done
        if len(self._answers) < self._majority:
            raise most_telling(self._errors)
        return self._answers


async def ask_nodes(
    nodes: QuorumNodes, call: ScriptCall, read: Callable[[Reply], T], enough: Callable[[Collection[T]], bool]
) -> Mapping[int, T]:
    """
    Ask the nodes that vote, as `Poll` describes it.

    Raises:
        Exception: no majority has answered.
    """
    voters = nodes.voters() or await nodes.quorum()
    poll = Poll(len(nodes), len(voters.nodes), read, enough)
    request = NodeRequest(call)
    for node in voters.nodes:
        node.send(request, poll.answer)
    return await poll.result()


async def find_hold(nodes: QuorumNodes, requests: QuorumRequests, name: str) -> tuple[SeenHold | None, set[int]]:
    """
    Ask who holds *name*: what a majority shows, and the nodes that have shown it. None if no owner has a majority.

    Raises:
        Exception: no majority has answered.
    """
    answers = await ask_nodes(nodes, requests.inspect(name), read_hold, lambda seen: is_decided(seen, nodes.majority))
    shown = shown_by_majority(answers.values(), nodes.majority)
    if shown is None:
        return None, set()
    same = (shown.owner, shown.token)
    return shown, {node for node, hold in answers.items() if hold is not None and (hold.owner, hold.token) == same}


def shown_by_majority(seen: Collection[SeenHold | None], majority: int) -> SeenHold | None:
    """The hold of the one owner and token that a *majority* shows, and how long it lasts there; None: there is none."""
    shown, count = _most(seen)
    if shown is None or count < majority:
        return None
    holds = [hold for hold in seen if hold is not None and (hold.owner, hold.token) == shown]
    left = sorted((hold.left for hold in holds), reverse=True)[majority - 1]
    return SeenHold(*shown, left, holds[0].metadata)


def is_decided(seen: Collection[SeenHold | None], majority: int) -> bool:
    """Whether further answers cannot change what a majority shows."""
    return _most(seen)[1] >= majority


def _most(seen: Collection[SeenHold | None]) -> tuple[tuple[str, int] | None, int]:
    """The owner and token that most nodes show, or None for "free", and how many nodes that is."""
    counts = Counter(None if hold is None else (hold.owner, hold.token) for hold in seen)
    return counts.most_common(1)[0] if counts else (None, 0)
