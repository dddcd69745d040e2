"""Reads the answers of scripts: accepted, refused, or that the key of the fence holds something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from fencing_sdk._values.claim import Token
from fencing_sdk._values.token_wire import token_of_parts
from fencing_sdk.errors import BackendRefusedError, shown
from fencing_sdk.guards._verdict import refusal
from fencing_sdk.guards.redis._commands import Command

_REFUSED, _ACCEPTED = 0, 1


def accepted(tokens: Mapping[str, Token], fences: Sequence[bytes], reply: object) -> object:
    """
    Return the value of a script whose check has accepted the *tokens*, of which each resource has a fence.

    Raises:
        StaleTokenError: the check has refused one.
        BackendRefusedError: the key of the fence holds something that no guard has written.
    """
    verdict, *rest = cast("list[object]", reply)
    if verdict == _ACCEPTED:
        return rest[0] if rest else None
    which = cast("int", rest[-1]) - 1
    if verdict == _REFUSED:
        resource, token = list(tokens.items())[which]
        number, holder = (_text(part) for part in rest[:-1])
        raise refusal(resource, token, Token(int(number), holder or None))
    raise _no_fence(fences[which], "write")


def fence_from(stored: object, key: bytes) -> Token:
    """
    Read the fence that is *stored* at *key*.

    Raises:
        BackendRefusedError: it is no fence.
    """
    number, space, holder = _text(stored).partition(" ")
    token = token_of_parts(number, holder if space else None)
    if token is None:
        raise _no_fence(key, "highest")
    return token


def unless_failed(replies: list[object], commands: Sequence[Command]) -> list[object]:
    """Return the *replies*; raise the last, with a note, if it is an error of the server."""
    failed = replies[-1]
    if isinstance(failed, Exception):
        name = str(commands[len(replies) - 1][0])
        position = f"command {len(replies)} of {len(commands)}, {name}, failed"
        failed.add_note(f"fencing_sdk: {position}; the writes of those before it stay, those after it did not run")
        raise failed
    return replies


def _no_fence(key: bytes, operation: str) -> BackendRefusedError:
    return BackendRefusedError(
        "redis", operation, f"{shown(key)} is no fence; another program writes there, so set another prefix"
    )


def _text(reply: object) -> str:
    """Decode an ASCII *reply*, unless the client has decoded it."""
    return reply.decode("ascii", "replace") if isinstance(reply, bytes) else cast("str", reply)
