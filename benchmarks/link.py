"""A link that takes its time: it forwards to a port of this machine, and delivers each chunk later."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def slow_link(port: int, distance: float = 0.001) -> Iterator[int]:
    """
    The port of a link to *port*, at a *distance* of so many seconds there and back.

    It runs in a process of its own, so that it costs the measured one nothing.
    """
    command = [sys.executable, __file__, str(port), str(distance / 2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    while chunk := await reader.read(65536):
        loop.call_later(delay, writer.write, chunk)
    loop.call_later(delay, writer.close)


async def _serve(target: int, delay: float) -> None:
    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, target)
        for end in (writer, back):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_forward(reader, back, delay), _forward(there, writer, delay))

    server = await asyncio.start_server(link, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
