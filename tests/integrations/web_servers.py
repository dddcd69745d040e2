"""Real servers on 127.0.0.1, and a client that sends what no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from aiohttp import web

LIMIT = 20
"""Seconds after which a server that should have started or stopped is a failure."""


@contextlib.asynccontextmanager
async def aiohttp_server(app: web.Application) -> AsyncIterator[str]:
    """Serve *app* until the body ends; yields its URL."""
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class _Uvicorn(uvicorn.Server):
    """Tells when it listens, stops when it is told to, and leaves the signals of the test run alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set_result(None)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def uvicorn_server(app: Any) -> AsyncIterator[str]:
    """Serve *app* until the body ends; yields its URL."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http="h11", log_level="critical", timeout_graceful_shutdown=5
    )
    server = _Uvicorn(config)
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.wait({serving, server.listening}, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        assert server.started, "uvicorn did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.stopping.set()
        await asyncio.wait_for(serving, LIMIT)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        return json.loads(self.body)


async def send(url: str, *headers: bytes, method: bytes = b"PUT", path: bytes = b"/seats/42") -> Answer:
    """Send a request with *headers* as they are, byte for byte."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Connection: close", b"Content-Length: 0"]
        writer.write(b"\r\n".join([*lines, *headers, b"", b""]))
        await writer.drain()
        received = await asyncio.wait_for(reader.read(), LIMIT)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = received.partition(b"\r\n\r\n")
    return _answer(head.decode("latin-1").split("\r\n"), body)


def _answer(head: list[str], body: bytes) -> Answer:
    status, *fields = head
    pairs = [field.partition(": ") for field in fields]
    return Answer(int(status.split(" ")[1]), {name.lower(): value for name, _, value in pairs}, body)


def page_answers() -> list[Answer]:
    """The answers that the page for other languages shows."""
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    blocks = re.findall(r"^```http\n(.*?)\n\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [_answer(head.splitlines(), body.encode()) for head, body in blocks]
