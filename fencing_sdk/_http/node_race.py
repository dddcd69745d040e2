"""
One call to a cluster, whichever node answers it.

The call asks the nodes in an order. There are four reasons to ask the next one:

1. A node failed: it could not be reached, its answer was lost, or it says that it cannot answer.
2. No answer came for `patience` seconds. The requests that are under way go on, and the first answer counts.
3. All nodes hang. Then the call asks each once more, with twice the pause: after a failover a
   follower answers a new request, while one that it passed on to the former leader hangs for seconds.
4. A node says that another try will help. Then, after a pause, the call asks all nodes again, for as long as there are
   pauses; but at most two requests to each are under way.

Without a patience, one request at a time is under way. So it must be where a late one could grant a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import Context
from itertools import count
from typing import Any, Generic, TypeVar

from fencing_sdk._http.endpoints import Endpoint
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, any_unknown
from fencing_sdk._values.tasks import retrieve

__all__ = ["PATIENCE", "NodeRace"]

T = TypeVar("T")

_AT_ONE_NODE = 2
"""Requests of one call that may be under way to one node."""

PATIENCE = 0.25
"""Seconds without an answer before the call asks the next node too. A healthy cluster answers in milliseconds."""


class NodeRace(Generic[T]):
    """
    The requests of one call.

    Args:
        order: The nodes, the one to ask first at the beginning.

        ask: Sends the request to one node; raises `RequestFailedError`.

        leave: Called with each node that failed, or that was overtaken by another one: ask it last from now on.

        patience: Seconds before the next node gets the request too; None: only after a failure.

        is_final: Whether this failure ends the call.

        pauses: Seconds before each further round, if a node has said that another try will help.
    """

    def __init__(
        self,
        order: Sequence[Endpoint],
        ask: Callable[[Endpoint], Coroutine[Any, Any, T]],
        *,
        leave: Callable[[Endpoint], None],
        patience: float | None,
        is_final: Callable[[RequestFailedError], bool],
        pauses: Iterable[float] = (),
    ) -> None:
        self._order = order
        self._ask = ask
        self._leave = leave
        self._patience = patience if len(order) > 1 else None
        self._is_final = is_final
        self._pauses = iter(pauses)
        self._again = False  # a node has said in this round that another try will help
        self._under_way: dict[asyncio.Task[T], Endpoint] = {}
        self.failures: list[RequestFailedError] = []
        """What each node said that failed, the last one at the end."""
        self.overtaken = False
        """True if a request was left without an answer: it may still be carried out."""

    @property
    def earlier_unknown(self) -> bool:
        """True if another request of this call may still be carried out."""
        return self.overtaken or any_unknown(self.failures)

    async def run(self) -> T:
        """
        Return the first answer.

        Raises:
            RequestFailedError: no node answered; it is the last of `failures`.
        """
        return await (self._run_one_by_one() if self._patience is None else self._run_side_by_side(self._patience))

    async def _run_one_by_one(self) -> T:
        while True:
            for endpoint in self._order:
                try:
                    return await self._ask(endpoint)
                except RequestFailedError as failure:
                    self._note(endpoint, failure)
                except asyncio.CancelledError:  # most often the engine's time limit: the node hangs
                    self._leave(endpoint)
                    raise
            pause = self._pause_before_another_round()
            if pause is None:
                raise self.failures[-1]
            await asyncio.sleep(pause)

    async def _run_side_by_side(self, patience: float) -> T:
        turns = self._turns(patience)
        try:
            while True:
                pause = next(turns, None)
                for task in await self._settled(pause):
                    endpoint = self._under_way.pop(task)
                    if (failure := _failure(task)) is None:
                        return task.result()
                    self._note(endpoint, failure)
        finally:
            await self._end()

    def _note(self, endpoint: Endpoint, failure: RequestFailedError) -> None:
        """Take note of a failure; raise it if it ends the call."""
        self.failures.append(failure)
        self._again = self._again or failure.again
        final = self._is_final(failure)
        did_its_part = failure.again or (final and failure.outcome is RequestOutcome.REJECTED)
        if not did_its_part:
            self._leave(endpoint)
        if final:
            raise failure

    def _turns(self, patience: float) -> Iterator[float]:
        """Ask the next node at each step, and say how long to wait for an answer then."""
        for number in count(1):
            if number > 1 and not self._under_way and not self._again:
                return  # every node has failed, and none hangs
            pause = self._pause_before_another_round()
            if pause is not None and number > 1:
                yield pause
            elif number > _AT_ONE_NODE:
                return
            yield from self._round(patience * min(number, _AT_ONE_NODE))

    def _round(self, patience: float) -> Iterator[float]:
        for endpoint in self._order:
            if list(self._under_way.values()).count(endpoint) < _AT_ONE_NODE:
                task = asyncio.get_running_loop().create_task(self._ask(endpoint), context=Context())
                self._under_way[task] = endpoint
                yield patience

    def _pause_before_another_round(self) -> float | None:
        """Return the seconds before another round, if a node has said that one would help; else None."""
        again, self._again = self._again, False
        return next(self._pauses, None) if again else None

    async def _settled(self, pause: float | None) -> Sequence[asyncio.Task[T]]:
        """Wait for answers and failures, at most *pause* seconds."""
        if not self._under_way:
            if pause is None:
                raise self.failures[-1]
            await asyncio.sleep(pause)
            return ()
        done, _ = await asyncio.wait(self._under_way, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        return sorted(done, key=lambda task: _failure(task) is not None)  # an answer first

    async def _end(self) -> None:
        """Give up the requests that are left, also when the caller is cancelled: most often their nodes hang."""
        left, self._under_way = self._under_way, {}
        self.overtaken = bool(left)
        for endpoint in reversed(dict.fromkeys(left.values())):  # the one that hangs for the longest time at the end
            self._leave(endpoint)
        for task in left:
            task.add_done_callback(retrieve)
            task.cancel()
        if left:
            await asyncio.wait(left)


def _failure(task: asyncio.Task[Any]) -> RequestFailedError | None:
    """The failure of a request that is done; another error is raised."""
    error = task.exception()
    if error is not None and not isinstance(error, RequestFailedError):
        raise error
    return error
