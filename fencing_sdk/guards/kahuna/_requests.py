"""What is asked of Kahuna's key-values, and how answers are read: one request for each method."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique

from fencing_sdk._http.bodies import UnreadableAnswerError, to_json
from fencing_sdk._http.endpoints import Endpoint, Endpoints, read_endpoints
from fencing_sdk._http.node_race import PATIENCE, NodeRace
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, any_unknown
from fencing_sdk._kahuna.node import NodeClient, rules_for
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = [
    "GUARD",
    "LATEST",
    "KahunaValues",
    "SetOutcome",
    "StoredValue",
    "UnreachedError",
    "ValueAnswer",
    "read_nodes",
]

GUARD = "KahunaGuard"
_SET, _GET = "/v1/kv/try-set", "/v1/kv/try-get"
_PERSISTENT = 1
_IF_ABSENT, _IF_REVISION = 9, 33  # to set, together with the condition
LATEST = -1
"""The number that asks for the present revision. Without a number, 0 is read: the oldest value."""


@unique
class _AnswerType(IntEnum):
    SET = 0
    NOT_SET = 1
    GOT = 3
    INVALID_INPUT = 100
    MISSING = 103
    OPEN = -1
    """Any other type, such as 99 (Errored) or 101 (MustRetry): it leaves open what was done."""


_TYPES = {type_.value: type_ for type_ in _AnswerType if type_ is not _AnswerType.OPEN}


class UnreachedError(BackendUnavailableError):
    """No node could be reached, so nothing was done."""


class SetOutcome(IntEnum):
    """What became of a conditional write."""

    DONE = 0
    NOT_SET = 1
    """The condition did not hold, and no earlier request of this call can have been carried out."""
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as it is stored."""

    value: bytes
    revision: int
    expires: bool


@dataclass(frozen=True, slots=True)
class ValueAnswer:
    """An answer that could be read."""

    type: _AnswerType
    fields: dict[str, object]

    @classmethod
    def read(cls, body: bytes, _: str | None = None) -> ValueAnswer:
        """
        Read the body of an HTTP 200.

        Raises:
            UnreadableAnswerError: it is not JSON, or has no type.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            msg = "the answer is not JSON"
            raise UnreadableAnswerError(msg) from error
        code = fields.get("type") if isinstance(fields, dict) else None
        if type(code) is not int:
            msg = "the answer has no type"
            raise UnreadableAnswerError(msg)
        return cls(_TYPES.get(code, _AnswerType.OPEN), fields)

    def stored(self) -> StoredValue:
        """
        The value that was got.

        Raises:
            UnreadableAnswerError: a part of it is missing.
        """
        text, revision, expires = (self.fields.get(name) for name in ("value", "revision", "expires"))
        if type(revision) is not int or revision < 0 or not isinstance(expires, dict):
            msg = "the answer has a value without its revision or its expiry"
            raise UnreadableAnswerError(msg)
        try:
            value = b64decode(text if isinstance(text, str) else "!", validate=True)
        except ValueError as error:
            msg = "the answer has a value that is not base64"
            raise UnreadableAnswerError(msg) from error
        return StoredValue(value, revision, expires=bool(expires.get("l")))


def read_nodes(texts: object, *, tls: bool) -> Endpoints:
    """
    Read the address of each node.

    Raises:
        ConfigurationError: there is no address, or one cannot be read.
    """
    return read_endpoints(texts, rules_for(_SET, _GET), tls=tls)


class KahunaValues:
    """
    The requests of one guard.

    All of them may be sent to several nodes, carried out twice, and carried out late: a write has a condition that
    holds once at most.
    """

    def __init__(self, nodes: NodeClient[ValueAnswer], endpoints: Endpoints) -> None:
        self._nodes = nodes
        self._endpoints = endpoints

    async def get(self, operation: str, key: str, revision: int = LATEST) -> StoredValue | None:
        """
        The value of *key* now, or at *revision*; None where there is none.

        Raises:
            UnreachedError: no node could be reached.
            BackendUnavailableError: no node answered.
            BackendRefusedError: Kahuna rejects the request.
        """
        body = {"key": key, "revision": revision, "durability": _PERSISTENT}
        answer, _ = await self._ask(operation, _GET, body, key)
        if answer.type is _AnswerType.MISSING:
            return None
        if answer.type is not _AnswerType.GOT:
            raise _unexpected(operation, answer)
        try:
            return answer.stored()
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(GUARD, operation, str(error)) from error

    async def replace(self, operation: str, key: str, revision: int | None, value: bytes) -> SetOutcome:
        """
        Write *value* if *key* is at *revision*, or, with None, if it does not exist.

        Raises:
            BackendRefusedError: Kahuna rejects the request, and nothing was written.
        """
        body: dict[str, object] = {"key": key, "value": b64encode(value).decode(), "durability": _PERSISTENT}
        condition = {"flags": _IF_ABSENT} if revision is None else {"flags": _IF_REVISION, "compareRevision": revision}
        try:
            answer, earlier_unknown = await self._ask(operation, _SET, {**body, "expiresMs": 0, **condition}, key)
        except BackendUnavailableError:
            return SetOutcome.UNKNOWN
        if answer.type is _AnswerType.SET:
            return SetOutcome.DONE
        if earlier_unknown:
            return SetOutcome.UNKNOWN
        if answer.type is not _AnswerType.NOT_SET:
            raise _unexpected(operation, answer)
        return SetOutcome.NOT_SET

    async def _ask(self, operation: str, path: str, body: dict[str, object], key: str) -> tuple[ValueAnswer, bool]:
        """Ask the node that answered last for *key* first. Return also whether another request may be carried out."""
        payload = to_json(body)

        async def ask(endpoint: Endpoint) -> ValueAnswer:
            answer = await self._nodes.post(endpoint.urls[path], payload)
            if answer.type is _AnswerType.OPEN:
                detail = f"the answer was of type {answer.fields['type']}"
                raise RequestFailedError(RequestOutcome.UNKNOWN, detail, again=True)
            self._endpoints.mark_answered(endpoint, key)
            return answer

        race = NodeRace(
            self._endpoints.in_turn(key),
            ask,
            leave=self._endpoints.mark_failed,
            patience=PATIENCE,
            is_final=lambda _: False,
        )
        try:
            async with await self._nodes.pool.turn(operation):
                answer = await race.run()
        except RequestFailedError as failure:
            raise _error(operation, race.failures) from failure
        return answer, race.earlier_unknown

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        await self._nodes.aclose()


def _error(operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """Refused only if every node has rejected the request; without a connection only if none may have received it."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    if decisive.outcome is RequestOutcome.REJECTED:
        return BackendRefusedError(GUARD, operation, decisive.detail)
    kind = BackendUnavailableError if any_unknown(failures) else UnreachedError
    return kind(GUARD, operation, decisive.detail)


def _unexpected(operation: str, answer: ValueAnswer) -> BackendError:
    if answer.type is _AnswerType.INVALID_INPUT:
        return BackendRefusedError(GUARD, operation, "Kahuna does not accept the request (InvalidInput)")
    return BackendUnavailableError(GUARD, operation, f"the answer was of type {answer.type:d}")
