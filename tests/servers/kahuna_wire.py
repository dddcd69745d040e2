"""
How a Kahuna reads a request and writes an answer, to the letter: ASP.NET's JSON, and which members an answer has.

Member names have any case and the last of two counts; numbers may be texts, but enums may not; base64 may hold white
space, but no odd bits. What cannot be read is an HTTP 400, what is missing or out of range an answer of type 100.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, NoReturn

Fields = dict[str, Any]
Moment = dict[str, int]

LOCK_CALLS = ("try-lock", "try-extend", "try-unlock", "get-info")
VALUE_CALLS = ("try-set", "try-get", "try-exists", "try-delete")

LOCKED, BUSY, EXTENDED, UNLOCKED, GOT = 0, 1, 2, 3, 4
WAITING_FOR_REPLICATION, ERRORED, INVALID_INPUT, MUST_RETRY = 10, 99, 100, 101
LOCK_DOES_NOT_EXIST, INVALID_OWNER, ABORTED = 102, 103, 104
SET, NOT_SET, VALUE_GOT, DELETED, NO_SUCH_KEY = 0, 1, 3, 4, 103

EPHEMERAL, PERSISTENT = 0, 1
NO_MOMENT: Moment = {"n": 0, "l": 0, "c": 0}
_NODE = 1
_DEPTH = 64
"""How deep JSON may be nested."""


class UnreadableRequestError(ValueError):
    """The body is an HTTP 400."""


def moment(milliseconds: int) -> Moment:
    """A hybrid clock's reading."""
    return {"n": _NODE, "l": milliseconds, "c": 0} if milliseconds else dict(NO_MOMENT)


# What a request may hold


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UnreadableRequestError
    if isinstance(value, str):
        value.encode()  # a lone surrogate is a ValueError
    return value


def _bytes(value: object) -> str | None:
    """Base64, written as the server writes it."""
    text = _text(value)
    if text is None:
        return None
    compact = "".join(text.split())
    if b64encode(b64decode(compact, validate=True)).decode() != compact:
        raise UnreadableRequestError
    return compact


def _number(bits: int, *, texts: bool = True) -> Callable[[object], int]:
    limit = 2 ** (bits - 1)

    def read(value: object) -> int:
        if texts and isinstance(value, str):
            value = int(value)
        if type(value) is not int or not -limit <= value < limit:
            raise UnreadableRequestError
        return value

    return read


_INT, _LONG, _ENUM = _number(32), _number(64), _number(32, texts=False)
_LOCK = {"resource": _text, "durability": _ENUM}
_CLAIM = {**_LOCK, "owner": _bytes}
_KEY = {"key": _text, "durability": _ENUM}
_MEMBERS: dict[str, dict[str, Callable[[object], Any]]] = {
    "try-lock": {**_CLAIM, "expiresMs": _INT},
    "try-extend": {**_CLAIM, "expiresMs": _INT},
    "try-unlock": _CLAIM,
    "get-info": _LOCK,
    "try-set": {
        **_KEY,
        "value": _bytes,
        "compareValue": _bytes,
        "compareRevision": _LONG,
        "flags": _ENUM,
        "expiresMs": _INT,
    },
    "try-get": {**_KEY, "revision": _LONG},
    "try-exists": {**_KEY, "revision": _LONG},
    "try-delete": _KEY,
}


def read_request(call: str, body: bytes) -> Fields:
    """
    Read the members of *call* that *body* has.

    Raises:
        UnreadableRequestError: it is none.
    """
    try:
        document = json.loads(body.decode(), parse_constant=_no_number)
        if not isinstance(document, dict) or _deeper_than(document, _DEPTH):
            raise UnreadableRequestError
        written = {name.lower(): value for name, value in document.items()}
        members = _MEMBERS[call].items()
        return {name: read(written[name.lower()]) for name, read in members if name.lower() in written}
    except (ValueError, RecursionError, binascii.Error) as error:
        raise UnreadableRequestError from error


def _no_number(_: str) -> NoReturn:
    raise UnreadableRequestError


def _deeper_than(document: object, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        children = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        level = [item for items in children for item in items]
    return any(isinstance(item, dict | list) for item in level)


# What is answered


def invalid(call: str, fields: Fields) -> Fields | None:
    """The answer to *fields* that can be read and mean nothing."""
    durations = {"try-lock", "try-extend"}
    if call in LOCK_CALLS:
        if not fields.get("resource") or (call in durations and fields.get("expiresMs", 0) <= 0):
            return lock_answer(call, INVALID_INPUT, served=None)
        if call != "get-info" and not fields.get("owner"):
            return lock_answer(call, INVALID_INPUT, served=fields.get("owner"))
        return None
    missing = call == "try-set" and (fields.get("value") is None or fields.get("expiresMs", 0) < 0)
    return value_answer(call, INVALID_INPUT, served=None) if missing or not fields.get("key") else None


def lock_answer(
    call: str, kind: int, token: int = 0, *, owner: str | None = None, expires: int = 0, served: str | None = ""
) -> Fields:
    """All members of an answer about a lock."""
    if call != "get-info":
        return {"servedFrom": served, "type": kind, "fencingToken": token}
    heard = {"owner": owner, "expires": moment(expires), "fencingToken": token}
    return {"servedFrom": "" if kind == GOT else None, "type": kind, **heard}


def value_answer(
    call: str,
    kind: int,
    revision: int = 0,
    *,
    value: str | None = None,
    expires: int = 0,
    modified: int = 0,
    served: str | None = "",
) -> Fields:
    """All members of an answer about a value."""
    last = {"lastModified": moment(modified)}
    if call in {"try-set", "try-delete"}:
        return {"servedFrom": None, "type": kind, "revision": revision, **last}
    content = {"value": value} if call == "try-get" else {}
    return {"servedFrom": served, "type": kind, **content, "revision": revision, "expires": moment(expires), **last}


def any_answer(call: str, kind: int) -> Fields:
    """An answer that tells no more than its type, such as "must retry"."""
    return lock_answer(call, kind) if call in LOCK_CALLS else value_answer(call, kind)


def written(answer: Fields) -> str:
    """JSON as .NET writes it."""
    return json.dumps(answer, ensure_ascii=True).replace("+", "\\u002B")
