"""What a script answered: accepted, refused, or that there is no fence where one should be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from fencing_sdk._values.claim import Token
from fencing_sdk.errors import BackendRefusedError, shown
from fencing_sdk.guards._verdict import refusal
from fencing_sdk.guards.redis._commands import Command

_REFUSED, _ACCEPTED = 0, 1
_FENCE = re.compile(r"([0-9]{1,16})(?: ([0-9a-f]{1,64}))?", re.ASCII)


def accepted(resource: str, token: Token, fence: bytes, reply: object) -> object:
    """
    The value that a script returned after its check, if that let the *token* in.

    Raises:
        StaleTokenError: it did not.
        BackendRefusedError: what is at the key of the fence was not written by a guard.
    """
    verdict, *rest = cast("list[object]", reply)
    if verdict == _ACCEPTED:
        return rest[0] if rest else None
    if verdict == _REFUSED:
        number, holder = (_text(part) for part in rest)
        raise refusal(resource, token, Token(int(number), holder or None))
    raise _no_fence(fence, "write")


def fence_from(stored: object, key: bytes) -> Token:
    """
    The fence that is *stored* at *key*.

    Raises:
        BackendRefusedError: it is none.
    """
    match = _FENCE.fullmatch(_text(stored))
    if match is None:
        raise _no_fence(key, "highest")
    return Token(int(match[1]), match[2])


def unless_failed(replies: list[object], commands: Sequence[Command]) -> list[object]:
    """The *replies*, unless the last is the server's error: then that is raised, with a note."""
    failed = replies[-1]
    if isinstance(failed, Exception):
        name = str(commands[len(replies) - 1][0])
        position = f"command {len(replies)} of {len(commands)}, {name}, failed"
        failed.add_note(f"fencing_sdk: {position}; what ran before it stays, what follows did not run")
        raise failed
    return replies


def _no_fence(key: bytes, operation: str) -> BackendRefusedError:
    return BackendRefusedError(
        "redis", operation, f"{shown(key)} is no fence; something else writes there, or prefix= is taken"
    )


def _text(reply: object) -> str:
    """What an ASCII *reply* says, to a client that decodes replies and to one that does not."""
    return reply.decode("ascii", "replace") if isinstance(reply, bytes) else cast("str", reply)
