"""
One call to the cluster, whichever node answers it.

Every request may be repeated, because Kahuna gives the same owner the same grant. What a call does then:

1. The node that answered last for this lock comes first: which node serves is a matter of the lock. After a node that
   cannot be reached, or says MustRetry, the next one comes at once: MustRetry may go on for ever. After each round
   of all nodes there is a pause, because another request for this lock may be replicating.
2. Renewals, releases and looks (`KahunaCluster.ask_widely`) are also sent to the next node when there is no answer
   soon. Acquisitions (`KahunaCluster.ask`) are not: a late grant must be known to the engine.
3. A node that is cut off from the others refuses what the majority would allow: a yes needs a quorum, a no does not.
   So if the caller does not believe a no, the cluster asks the other nodes for a second at most, and a yes wins.
   If one of them gives no answer, it may have said yes.

A request whose answer was lost may still be carried out; the answer of the next node has ``earlier_unknown`` set then,
because its "busy" does not mean that nothing was granted. The same holds for Errored: it was said of grants that were
made all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fencing_sdk._http.endpoints import Endpoint, Endpoints
from fencing_sdk._http.node_race import PATIENCE, NodeRace
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome
from fencing_sdk._kahuna import NodeClient
from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends.kahuna.requests import BACKEND, AnswerType, KahunaAnswer, error_of_failures
from fencing_sdk.errors import BackendError, BackendUnavailableError

__all__ = ["KahunaCluster"]

PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Seconds before each further round while nodes cannot answer yet: another request is being replicated."""
_LONGEST_PAUSE = 0.1
_SOON_PART = 1 / 40
"""Part of a ttl after which a request without an answer is also sent to the next node, if that is less."""
_LATEST_PART = 1 / 10
"""Part of a ttl after which it is sent there although answers are usually slow."""
_PATIENCE_PART = 1 / 6
_LONGEST_PATIENCE = 2.0
"""
Part of a ttl, and the most seconds, for which a renewal or release is repeated while nodes cannot answer.

It is less than an interval, so that the engine learns why there is no answer. The engine then asks again.
"""
_DOUBT = 1.0
"""Seconds for asking the other nodes about a refusal that the caller does not believe."""
_USUALLY = 3
"""Times the usual time of an answer after which it is late: a slow cluster is not sent more than a fast one."""
_WEIGHT = 1 / 16

_NOT_YET = {AnswerType.MUST_RETRY, AnswerType.WAITING_FOR_REPLICATION}
"""A change of the lock is being replicated, or nothing can be; the second is what `get-info` says of it."""


class KahunaCluster:
    """Asks the nodes until one answers."""

    def __init__(self, nodes: NodeClient[KahunaAnswer], endpoints: Endpoints) -> None:
        self._nodes = nodes
        self._endpoints = endpoints
        self._usual_time = 0.0

    async def ask(self, operation: str, path: str, body: bytes, name: str) -> KahunaAnswer:
        """
        Ask one node after the other about the lock *name*.

        Raises:
            BackendUnavailableError: no node answered; the outcome is unknown.
            BackendRefusedError: every node rejected the request.
        """
        order = self._endpoints.in_turn(name)
        race = self._race(order, path, body, name, soon=None, pauses=_pauses(sum(PAUSES)))
        return await self._answer(operation, race)

    async def ask_widely(
        self, operation: str, path: str, body: bytes, name: str, *, ttl: float, doubted: Collection[AnswerType] = ()
    ) -> KahunaAnswer:
        """
        `ask` for requests that may be carried out twice and late: also ask the next node when no answer comes soon.

        Args:
            operation: What is done, for errors.

            path: The path of the request.

            body: The request.

            name: The lock.

            ttl: Seconds that its grant lasts: they decide what is soon.

            doubted: Answers that need the word of the other nodes too.
        """
        order = self._endpoints.in_turn(name)
        patience = min(_LONGEST_PATIENCE, ttl * _PATIENCE_PART)
        soon = min(max(min(PATIENCE, ttl * _SOON_PART), self._usual_time * _USUALLY), ttl * _LATEST_PART)
        race = self._race(order, path, body, name, soon=soon, pauses=_pauses(patience, longest=soon))
        answer = await self._answer(operation, race)
        if answer.type in doubted and len(order) > 1:
            limit = min(_DOUBT, patience)
            others = _Others(order, answer, doubted)
            race = self._race(
                others.order, path, body, name, soon=soon, pauses=_pauses(limit, longest=soon), others=others
            )
            with contextlib.suppress(TimeoutError, BackendError):
                async with asyncio.timeout(limit):
                    return await self._answer(operation, race)
            return replace(answer, earlier_unknown=answer.earlier_unknown or race.earlier_unknown)
        return answer

    def _race(
        self,
        order: Sequence[Endpoint],
        path: str,
        body: bytes,
        name: str,
        *,
        soon: float | None,
        pauses: Iterator[float],
        others: _Others | None = None,
    ) -> NodeRace[KahunaAnswer]:
        async def ask(endpoint: Endpoint) -> KahunaAnswer:
            answer = await self._ask_node(endpoint, path, body, name)
            if others is not None:
                others.check(answer)
            return answer

        def leave(endpoint: Endpoint) -> None:
            if others is None or endpoint not in others.refusing:
                self._endpoints.mark_failed(endpoint)

        return NodeRace(order, ask, leave=leave, patience=soon, is_final=lambda _: False, pauses=pauses)

    async def _ask_node(self, endpoint: Endpoint, path: str, body: bytes, name: str) -> KahunaAnswer:
        """One request to one node; an answer that settles nothing is a failure after which another try helps."""
        sent_at = asyncio.get_running_loop().time()
        answer = await self._nodes.post(endpoint.urls[path], body)
        if answer.type in _NOT_YET:
            raise RequestFailedError(RequestOutcome.UNSENT, "the cluster cannot answer yet (MustRetry)", again=True)
        if answer.type is AnswerType.ERRORED:
            raise RequestFailedError(RequestOutcome.UNKNOWN, "the answer was Errored", again=True)
        self._usual_time += (asyncio.get_running_loop().time() - sent_at - self._usual_time) * _WEIGHT
        self._endpoints.mark_answered(endpoint, name, answer.hint)
        return replace(answer, node=endpoint)

    async def _answer(self, operation: str, race: NodeRace[KahunaAnswer]) -> KahunaAnswer:
        try:
            async with await self._nodes.pool.turn(operation):
                answer = await race.run()
        except RequestFailedError as failure:
            error = _error(operation, race.failures)
            raise error from error.__cause__ or failure
        if not race.failures and not race.overtaken:
            return answer
        retried = any(failure.again for failure in race.failures)
        return replace(answer, retried=retried, earlier_unknown=race.earlier_unknown)


class _Others:
    """The nodes to ask about a no that the caller does not believe."""

    def __init__(self, order: Sequence[Endpoint], answer: KahunaAnswer, doubted: Collection[AnswerType]) -> None:
        self.order = [endpoint for endpoint in order if endpoint is not answer.node]
        self.refusing: set[object] = set()
        """Those that say no as well. They have not failed."""
        self._doubted = doubted

    def check(self, answer: KahunaAnswer) -> None:
        if answer.type in self._doubted:
            self.refusing.add(answer.node)
            raise RequestFailedError(RequestOutcome.REJECTED, "another no")


def _error(operation: str, failures: list[RequestFailedError]) -> BackendError:
    """
    The error of a call that no node answered.

    A request that a node could not answer yet may still be carried out, so what follows it is not a refusal.
    """
    again = [failure for failure in failures if failure.again]
    if not again:
        return error_of_failures(failures, operation)
    last = failures[-1] if failures[-1].outcome is RequestOutcome.REJECTED else again[-1]
    return BackendUnavailableError(BACKEND, operation, last.detail)


def _pauses(seconds: float, *, longest: float = _LONGEST_PAUSE) -> Iterator[float]:
    """The pauses between rounds: short at first, none longer than *longest*, and *seconds* in all."""
    pause = PAUSES[0]
    while seconds > 0:
        yield min(pause, seconds) * JITTER.uniform(0.5, 1.0)
        seconds -= pause
        pause = min(pause * 2, longest, _LONGEST_PAUSE)
