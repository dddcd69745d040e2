"""The body of a request, and the body of an answer."""

from __future__ import annotations

import json

import aiohttp

__all__ = ["UnreadableAnswerError", "read_body", "to_json"]

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each call


class UnreadableAnswerError(ValueError):
    """The answer is none of this store. It says nothing about what the store has done."""


def to_json(fields: dict[str, object]) -> bytes:
    """Write the body of a request."""
    return _encode(fields).encode()


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """
    Read an answer to its end.

    Raises:
        UnreadableAnswerError: it is longer than *limit* bytes; the connection is closed.
    """
    body = await response.content.readany()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > limit:
            break
    if len(body) > limit:
        response.close()
        msg = f"the answer is longer than {limit} bytes"
        raise UnreadableAnswerError(msg)
    return body
