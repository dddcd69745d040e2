"""A server in the test's own event loop that leaves no connection behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

HOST = "127.0.0.1"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@contextlib.asynccontextmanager
async def serving(handle: Handler, port: int = 0) -> AsyncIterator[int]:
    """
    Answer connections by *handle*, on *port* or a free one, which is yielded.

    At the end all connections are closed, and the transports see it before the loop ends: one that is collected later
    complains in the middle of another test.
    """
    connections: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections[task] = writer
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await handle(reader, writer)

    server = await asyncio.start_server(answer, HOST, port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)  # the answer to a connection begins in the turn after it
        for writer in connections.values():
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if connections:
            await asyncio.wait(connections)
