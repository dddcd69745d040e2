"""A link that takes its time: forwards to a port of this machine, each chunk half a millisecond later, each way."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

HOST = "127.0.0.1"
DELAY = 0.0005


@contextlib.contextmanager
def slow_link(port: int) -> Iterator[int]:
    """The port of a link to *port*, in a process of its own so that it costs the measured one nothing."""
    command = [sys.executable, __file__, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while chunk := await reader.read(65536):
        loop.call_later(DELAY, writer.write, chunk)
    loop.call_later(DELAY, writer.close)


async def _serve(target: int) -> None:
    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, target)
        await asyncio.gather(_forward(reader, back), _forward(there, writer))

    server = await asyncio.start_server(link, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
