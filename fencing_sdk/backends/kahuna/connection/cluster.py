"""
One call to the cluster, whichever node answers it.

Every request may be repeated, because Kahuna gives the same owner the same grant. So if a node cannot be reached,
or its answer is lost, the next node is asked at once. A request whose answer was lost may still be carried out;
the answer of the next node says so in ``earlier_unknown``, because its "busy" does not mean that nothing was granted.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from fencing_sdk._http.endpoints import Endpoints
from fencing_sdk._http.outcomes import RequestFailedError, any_unknown
from fencing_sdk._kahuna.node import NodeClient
from fencing_sdk.backends.kahuna.errors import BACKEND, error_of_failures
from fencing_sdk.backends.kahuna.requests import AnswerType, KahunaAnswer
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

__all__ = ["KahunaCluster"]

PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Seconds before each further try while nodes answer "must retry": another request is being replicated."""


_NOT_YET = {AnswerType.MUST_RETRY, AnswerType.WAITING_FOR_REPLICATION}
"""A change of the lock is being replicated; the second is what `get-info` says of it."""


class KahunaCluster:
    """Asks the nodes in turn until one answers."""

    def __init__(self, nodes: NodeClient[KahunaAnswer], endpoints: Endpoints) -> None:
        self._nodes = nodes
        self._endpoints = endpoints

    async def ask(self, operation: str, path: str, body: bytes) -> KahunaAnswer:
        """
        Ask node after node until one answers, and again while the answer is "must retry".

        Raises:
            BackendUnavailableError: no node answered; the outcome is unknown.
            BackendRefusedError: every node rejected the request.
        """
        answer = await self._ask_nodes(operation, path, body)
        if answer.type in _NOT_YET:
            answer = await self._ask_again(operation, path, body, earlier_unknown=answer.earlier_unknown)
        return answer

    async def _ask_again(self, operation: str, path: str, body: bytes, *, earlier_unknown: bool) -> KahunaAnswer:
        for number, pause in enumerate(PAUSES):
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            if number:  # twice in a row from one node: it may have lost its cluster
                self._endpoints.mark_failed(self._endpoints.in_turn()[0])
            try:
                answer = await self._ask_nodes(operation, path, body)
            except BackendRefusedError as error:  # the request before it may still be carried out
                raise BackendUnavailableError(BACKEND, operation, error.detail) from error
            earlier_unknown = earlier_unknown or answer.earlier_unknown
            if answer.type not in _NOT_YET:
                return replace(answer, retried=True, earlier_unknown=earlier_unknown)
        raise BackendUnavailableError(BACKEND, operation, "the cluster cannot answer yet (MustRetry)")

    async def _ask_nodes(self, operation: str, path: str, body: bytes) -> KahunaAnswer:
        failures: list[RequestFailedError] = []
        for endpoint in self._endpoints.in_turn():
            try:
                answer = await self._nodes.post(endpoint.urls[path], body)
            except RequestFailedError as failure:
                self._endpoints.mark_failed(endpoint)
                failures.append(failure)
            except asyncio.CancelledError:  # most often the engine's time limit: the node hangs
                self._endpoints.mark_failed(endpoint)
                raise
            else:
                return replace(answer, earlier_unknown=True) if any_unknown(failures) else answer
        raise error_of_failures(failures, operation)
