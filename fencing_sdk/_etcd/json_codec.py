"""
Requests and answers of etcd in JSON, as its gateway writes them. No I/O happens here.

Keys and values are base64, whole numbers of 64 bits are texts, and fields that are zero or false are left out.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, TypeAlias

from fencing_sdk._http.bodies import UnreadableAnswerError

__all__ = [
    "Entry",
    "Json",
    "compared",
    "decoded",
    "delete",
    "encoded",
    "entries",
    "nested",
    "number",
    "put",
    "ranged",
    "responses",
    "txn",
]

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
    def read(cls, fields: Json) -> Entry:
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
        msg = f"the answer has not {count} responses"
        raise UnreadableAnswerError(msg)
    return [next((part for part in each.values() if isinstance(part, dict)), {}) for each in found]


def entries(fields: Json) -> list[Entry]:
    """The keys that a range found."""
    found = fields.get("kvs", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        msg = "the answer has no list of keys"
        raise UnreadableAnswerError(msg)
    return [Entry.read(each) for each in found]
