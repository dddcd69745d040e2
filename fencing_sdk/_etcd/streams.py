"""What a stream sends while it is open, and the answers that come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from types import MappingProxyType
from typing import Self

import aiohttp

from fencing_sdk._etcd.answers import BODY_LIMIT, read_answer
from fencing_sdk._etcd.json_codec import Json
from fencing_sdk._http.bodies import read_body, to_json

__all__ = ["StreamRequests", "stream_answers"]


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
