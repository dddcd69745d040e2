"""A request that comes in the very moment in which ZooKeeper is lost, and answers that come out of turn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Self

import pytest
from kazoo.exceptions import ConnectionLoss

from fencing_sdk import BackendUnavailableError
from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.backends.zookeeper.connection import kazoo_requests as _requests

pytest_plugins = ["zookeeper_fixtures"]


@pytest.fixture
def server(start_zookeeper):
    return start_zookeeper()


@pytest.fixture
async def backend(server):
    backend = from_url(server.url)
    await backend.acquire(Claim("a", 60.0))
    yield backend
    await backend.aclose()


def lose(server, session) -> None:
    """Kill the server while the loop stands still, so that it does not hear what the driver sees."""
    server.kill()
    client, end = session._driver._client, time.monotonic() + 20
    while client.connected:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert session.connected


@pytest.mark.parametrize("call", ["inspect", "acquire"])
async def test_it_fails_as_soon_as_the_loss_is_known(call, server, backend):
    session = backend._sessions.of(60.0)
    lose(server, session)
    async with asyncio.timeout(20.0):  # and not when the server comes back: it does not
        with pytest.raises(BackendUnavailableError):
            await (backend.inspect("a") if call == "inspect" else backend.acquire(Claim("b", 60.0)))


async def test_it_is_not_sent_when_the_connection_is_back(server, backend):
    session = backend._sessions.of(60.0)
    lose(server, session)
    asked = session.call(_requests.create_persistent("/late", _requests.ALL_CLIENTS))
    assert not asked.done()
    await asyncio.to_thread(server.start)
    with pytest.raises((NoConnectionError, ConnectionLoss)):
        await asked
    async with asyncio.timeout(20.0):
        assert await session.settled()
        assert await session.call(_requests.exists("/late")) is None


class Relay:
    """Passes everything on, but for one answer."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.losing = False
        self._target = port
        self._links: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._links:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        self._links += [writer, requests]
        await asyncio.gather(self._requests(reader, requests), self._answers(answers, writer))

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                answer = await reader.readexactly(int.from_bytes(size, "big"))
                if self.losing and int.from_bytes(answer[:4], "big", signed=True) > 0:  # no ping, no watch
                    self.losing = False
                else:
                    writer.write(size + answer)
        writer.close()


async def test_an_answer_out_of_turn_costs_the_connection_and_neither_session_nor_lease(server):
    claim = Claim("a", 60.0)
    async with Relay(server.port) as relay:
        backend = from_url(f"zk://127.0.0.1:{relay.port}/app")
        await backend.acquire(claim)
        driver = backend._sessions.of(60.0)._driver
        relay.losing = True
        both = await asyncio.gather(backend.inspect("a"), backend.inspect("b"), return_exceptions=True)
        assert not relay.losing
        assert any(isinstance(outcome, BackendUnavailableError) for outcome in both)
        renewal: list[Renewal] = []
        for _ in range(200):
            with contextlib.suppress(BackendUnavailableError):
                renewal = list(await backend.renew([claim]))
            if renewal not in ([], [Renewal.UNKNOWN]):
                break
            await asyncio.sleep(0.1)
        assert renewal == [Renewal.RENEWED]
        assert backend._sessions.of(60.0)._driver is driver
        await backend.release(claim)
        await backend.aclose()
