"""
One call to the cluster, whichever node answers it.

Every request of the contract may be repeated: the same owner gets the same grant. So a node that
cannot be reached, or whose answer was lost, is followed by the next one at once. What has to be
kept in mind is that a request whose answer was lost may still be carried out, so that a later
"no" does not mean that nothing was granted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from fencing_sdk.backends.kahuna._contract import Answer, Kind
from fencing_sdk.backends.kahuna._endpoints import Endpoints
from fencing_sdk.backends.kahuna._http import Fate, Http, NodeError
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = ["BACKEND", "Calls"]

BACKEND = "KahunaBackend"

PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Seconds between the tries that a node answers with "must retry": some other request is being replicated."""


class Calls:
    """Finds a node that answers."""

    def __init__(self, http: Http, endpoints: Endpoints) -> None:
        self._http = http
        self._endpoints = endpoints

    async def ask(self, operation: str, path: str, body: bytes) -> Answer:
        """
        Ask node after node until one answers, and the cluster until it can.

        Raises:
            BackendUnavailableError: no node answered; the outcome is unknown.
            BackendRefusedError: no node would have this request.
        """
        answer = await self._ask_nodes(operation, path, body)
        if answer.kind is Kind.MUST_RETRY:
            answer = await self._ask_again(operation, path, body, lost=answer.after_loss)
        return answer

    async def _ask_again(self, operation: str, path: str, body: bytes, *, lost: bool) -> Answer:
        for number, pause in enumerate(PAUSES):
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            if number:  # twice in a row from one node: it may have lost its cluster
                self._endpoints.failed(self._endpoints.in_turn()[0])
            try:
                answer = await self._ask_nodes(operation, path, body)
            except BackendRefusedError as error:  # the request before it may still be carried out
                raise BackendUnavailableError(BACKEND, operation, error.detail) from error
            lost = lost or answer.after_loss
            if answer.kind is not Kind.MUST_RETRY:
                return replace(answer, retried=True, after_loss=lost)
        raise BackendUnavailableError(BACKEND, operation, "the cluster cannot answer yet (MustRetry)")

    async def _ask_nodes(self, operation: str, path: str, body: bytes) -> Answer:
        errors: list[NodeError] = []
        for endpoint in self._endpoints.in_turn():
            try:
                answer = await self._http.post(endpoint.urls[path], body)
            except NodeError as error:
                self._endpoints.failed(endpoint)
                errors.append(error)
            except asyncio.CancelledError:  # most often the engine's limit: the node hangs
                self._endpoints.failed(endpoint)
                raise
            else:
                lost = any(error.fate is Fate.LOST for error in errors)
                return replace(answer, after_loss=True) if lost else answer
        raise self._silence(operation, errors)

    def _silence(self, operation: str, errors: Sequence[NodeError]) -> BackendError:
        """Refused is only what another try will not change *and* what surely granted nothing."""
        told = next((error for error in errors if error.fate is not Fate.REJECTED), errors[0])
        detail = told.detail if len(errors) == 1 else f"none of {len(errors)} nodes: {told.detail}"
        kind = BackendRefusedError if told.fate is Fate.REJECTED else BackendUnavailableError
        error = kind(BACKEND, operation, detail)
        error.__cause__ = told.__cause__
        return error
