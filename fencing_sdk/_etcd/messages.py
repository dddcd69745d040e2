"""
What requests and answers of etcd say, in JSON as its gateway writes them. No I/O happens here.

Keys and values are base64, whole numbers of 64 bits are texts, and fields that are zero or false are left out.

A member's error is read by its gRPC code, never by its text. `BackendRefusedError` is for what another try will not
change *and* what surely has done nothing. Everything else is a `BackendUnavailableError`: the outcome is unknown until
another request shows it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, UnreadableAnswerError, any_unknown
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, shown

__all__ = [
    "BODY_LIMIT",
    "INVALID",
    "NOT_NOW",
    "UNAUTHENTICATED",
    "Entry",
    "Json",
    "LeaseNotFoundError",
    "compared",
    "decoded",
    "delete",
    "encoded",
    "entries",
    "error_of_failures",
    "failure_by_code",
    "nested",
    "number",
    "put",
    "ranged",
    "read_answer",
    "responses",
    "txn",
]

INVALID, NOT_FOUND, DENIED, EXHAUSTED, NOT_NOW, UNIMPLEMENTED, UNAUTHENTICATED = 3, 5, 7, 8, 9, 12, 16
"""Codes of gRPC."""

_REJECTED, _UNSENT, _UNKNOWN = RequestOutcome.REJECTED, RequestOutcome.UNSENT, RequestOutcome.UNKNOWN
_BY_CODE = {
    INVALID: (_REJECTED, "etcd does not accept the request, or wants a user and a password"),
    NOT_FOUND: (_REJECTED, "the lease does not exist"),
    DENIED: (_REJECTED, "the user may not read and write the keys; see the page of the backend for its role"),
    EXHAUSTED: (_UNSENT, "etcd accepts no more: its space is used up (NOSPACE), or it is overloaded"),
    NOT_NOW: (_REJECTED, "etcd cannot do this in its state"),
    UNIMPLEMENTED: (_REJECTED, "etcd cannot do this; is it 3.4 or newer?"),
    UNAUTHENTICATED: (_REJECTED, "etcd does not accept the token of the login"),
}


class LeaseNotFoundError(BackendUnavailableError):
    """The lease does not exist, so nothing was done. A call with another lease may succeed."""


def failure_by_code(code: int, status: int, message: str) -> RequestFailedError:
    """Read a member's error. After a code that is not in the table, the outcome is unknown."""
    outcome, detail = _BY_CODE.get(code, (_UNKNOWN, f"HTTP {status}"))
    return RequestFailedError(outcome, f"{detail} ({shown(message)})" if message else detail, code)


def error_of_failures(component: str, operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """
    Make an error of the failures of all members in question.

    There are three cases:

    1. etcd does not know the lease, and no earlier request may still be carried out: `LeaseNotFoundError`.
    2. The request was rejected, and no earlier one may still be carried out: `BackendRefusedError`.
    3. Everything else: `BackendUnavailableError`.
    """
    last, unknown = failures[-1], any_unknown(failures)
    if last.code == NOT_FOUND and not unknown:
        return LeaseNotFoundError(component, operation, last.detail)
    decisive = last if last.code else next((failure for failure in failures if failure.outcome is not _REJECTED), last)
    text = decisive.sentence(operation)
    detail = text if len(failures) == 1 else f"{text} (the last of {len(failures)} members asked)"
    refused = decisive.outcome is _REJECTED and not unknown
    error = (BackendRefusedError if refused else BackendUnavailableError)(component, operation, detail)
    error.__cause__ = decisive
    return error


Json: TypeAlias = dict[str, Any]
_NUMBER_LIMIT = 2**63


def encoded(key: bytes) -> str:
    return b64encode(key).decode()


def decoded(text: object) -> bytes:
    try:
        return b64decode(text if isinstance(text, str) else "", validate=True)
    except ValueError as error:
        msg = "the answer has a key or a value that is not base64"
        raise UnreadableAnswerError(msg) from error


def number(fields: Json, name: str) -> int:
    """A whole number of 64 bits, 0 if the field was left out."""
    value = fields.get(name, 0)
    try:
        read = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        read = None
    if read is None or not -_NUMBER_LIMIT <= read < _NUMBER_LIMIT:
        msg = f"the answer has no number as {name}"
        raise UnreadableAnswerError(msg)
    return read


@dataclass(frozen=True, slots=True)
class Entry:
    """A key that exists."""

    key: bytes
    value: bytes
    created: int
    """The revision of the transaction that created it: greater than that of every key created before."""
    modified: int
    """The revision of the last put."""
    lease: int

    @classmethod
    def read(cls, fields: Json) -> Self:
        numbers = [number(fields, name) for name in ("create_revision", "mod_revision", "lease")]
        if min(numbers[:2]) <= 0:
            msg = "the answer has a key without its revisions"
            raise UnreadableAnswerError(msg)
        return cls(decoded(fields.get("key", "")), decoded(fields.get("value", "")), *numbers)


def compared(key: bytes, target: str, result: str, value: int | bytes, *, end: bytes | None = None) -> Json:
    """Compare ``CREATE`` or ``MOD`` with a revision, or ``VALUE`` with bytes, of *key* or of every key up to *end*."""
    field = {"CREATE": "create_revision", "MOD": "mod_revision", "VALUE": "value"}[target]
    wanted = encoded(value) if isinstance(value, bytes) else str(value)
    return {"key": encoded(key), "target": target, "result": result, field: wanted, **_up_to(end)}


def put(key: bytes, value: bytes, lease: int = 0) -> Json:
    fields = {"key": encoded(key), "value": encoded(value)}
    return {"request_put": {**fields, "lease": str(lease)} if lease else fields}


def delete(key: bytes) -> Json:
    return {"request_delete_range": {"key": encoded(key)}}


def ranged(
    key: bytes,
    *,
    end: bytes | None = None,
    first: int = 0,
    last: int = 0,
    most: int = 0,
    before: int = 0,
    after: int = 0,
    keys_only: bool = False,
) -> Json:
    """
    Read one key; or, of the keys up to *end*, so many of the *first* or the *last* that were created.

    With *most* instead, so many in the order of the keys. With *before* and *after*, only keys that were created
    before or after that revision count.
    """
    fields: Json = {"key": encoded(key), **_up_to(end)}
    if first or last:
        fields |= {"limit": str(first or last), "sort_target": "CREATE", "sort_order": "ASCEND" if first else "DESCEND"}
    elif most:
        fields["limit"] = str(most)
    if after:
        fields["min_create_revision"] = str(after + 1)
    if before:
        fields["max_create_revision"] = str(before - 1)
    if keys_only:
        fields["keys_only"] = True
    return {"request_range": fields}


def _up_to(end: bytes | None) -> Json:
    return {} if end is None else {"range_end": encoded(end)}


def txn(*, compare: list[Json], success: list[Json], failure: list[Json] | None = None) -> Json:
    return {"compare": compare, "success": success, "failure": failure or []}


def nested(*, compare: list[Json], success: list[Json], failure: list[Json] | None = None) -> Json:
    """A transaction as one operation of another one. What it compares is what was there before the outer one."""
    return {"request_txn": txn(compare=compare, success=success, failure=failure)}


def responses(fields: Json, count: int) -> list[Json]:
    """The answers of a transaction's operations, in order."""
    found = fields.get("responses", [])
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, dict) for each in found):
        msg = f"the answer does not have {count} responses"
        raise UnreadableAnswerError(msg)
    return [next((part for part in each.values() if isinstance(part, dict)), {}) for each in found]


E = TypeVar("E", bound=Entry)


def entries(fields: Json, kind: type[E]) -> list[E]:
    """The keys that a range found, each as one of this *kind*."""
    found = fields.get("kvs", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        msg = "the answer has no list of keys"
        raise UnreadableAnswerError(msg)
    return [kind.read(each) for each in found]


BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer: twice what etcd sends at most."""


def read_answer(body: bytes, status: int) -> Json:
    """
    Read one answer. In a stream, its fields stand in ``result``.

    Raises:
        RequestFailedError: the answer is an error, or an HTTP status that another try will not change.
        UnreadableAnswerError: it is not an answer of etcd.
    """
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        if 300 <= status < 500:  # noqa: PLR2004
            msg = f"HTTP {status}; is this the client port of an etcd 3.4 or newer? With TLS, write etcd+https://"
            raise RequestFailedError(RequestOutcome.REJECTED, msg)
        msg = "the answer is not a JSON object" if status == 200 else f"HTTP {status}"  # noqa: PLR2004
        raise UnreadableAnswerError(msg)
    error = fields.get("error")
    detail = error if isinstance(error, dict) else fields
    code = detail.get("code", detail.get("grpc_code"))
    if error is not None or status != 200:  # noqa: PLR2004
        raise failure_by_code(code if isinstance(code, int) else 0, status, str(detail.get("message", "")))
    result = fields.get("result", fields)
    return result if isinstance(result, dict) else {}
