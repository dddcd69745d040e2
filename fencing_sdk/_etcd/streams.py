"""
What a stream sends while it is open, and the answers that come meanwhile: those of a watch are read here, too.

An answer that cannot be read counts neither as a deletion nor as the absence of one: its reader opens a new stream
from the revision at which the last one began, and etcd repeats what has happened since.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import aiohttp

from fencing_sdk._etcd.messages import BODY_LIMIT, Json, decoded, number, read_answer
from fencing_sdk._http.outcomes import UnreadableAnswerError, read_body, to_json

__all__ = ["KeyDeletion", "StreamRequests", "WatchAnswer", "read_watch_answer", "stream_answers"]


class StreamRequests:
    """
    The requests of one stream, which are sent while its answers arrive.

    A server written in Go reads the whole body before its first answer, unless the client announces that the
    connection is closed afterwards. `HEADERS` do that.
    """

    HEADERS: Mapping[str, str] = MappingProxyType({"Connection": "close"})

    def __init__(self) -> None:
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, bodies: Iterable[Json]) -> bool:
        """Send *bodies* after all earlier ones; return whether there are any."""
        if lines := b"".join(to_json(body) + b"\n" for body in bodies):
            self._unsent.put_nowait(lines)
        return bool(lines)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await self._unsent.get()


async def stream_answers(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """
    Read the answers of a stream, one a line.

    Raises:
        RequestFailedError, UnreadableAnswerError: as `read_answer`.
    """
    if response.status != 200:  # noqa: PLR2004
        read_answer(await read_body(response, BODY_LIMIT), response.status)
    async for line in response.content:
        yield read_answer(line, response.status)


class KeyDeletion(NamedTuple):
    """The deletion of one key, also by the end of its lease."""

    key: bytes
    revision: int


class WatchAnswer(NamedTuple):
    """One answer."""

    watch_id: int
    """The watch of the stream that the answer is about; 0 if this client gave it no id."""
    cancelled: bool
    """True if etcd has ended the watch."""
    deletions: list[KeyDeletion]
    puts: int = 0
    """How many puts it reports."""


def read_watch_answer(fields: Json) -> WatchAnswer:
    """
    Read the whole answer before any part of it is used.

    Raises:
        UnreadableAnswerError: a part of it cannot be read.
    """
    cancelled, events = fields.get("canceled", False), fields.get("events", [])
    if not isinstance(cancelled, bool) or not isinstance(events, list):
        msg = "the answer is not one of a watch"
        raise UnreadableAnswerError(msg)
    found = [_deletion(event) for event in events]
    deletions = [deletion for deletion in found if deletion is not None]
    return WatchAnswer(number(fields, "watch_id"), cancelled, deletions, len(found) - len(deletions))


def _deletion(event: object) -> KeyDeletion | None:
    """Read an event; None: it is a put."""
    kind = event.get("type", "PUT") if isinstance(event, dict) else None
    if kind == "PUT":
        return None
    kv = event.get("kv") if isinstance(event, dict) and kind == "DELETE" else None
    if not isinstance(kv, dict):
        msg = "the answer has an event that is neither a put nor a deletion"
        raise UnreadableAnswerError(msg)
    read = KeyDeletion(decoded(kv.get("key")), number(kv, "mod_revision"))
    if not read.key or read.revision <= 0:
        msg = "the answer has a deletion without its key or its revision"
        raise UnreadableAnswerError(msg)
    return read
