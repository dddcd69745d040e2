"""A request that comes in the very moment in which ZooKeeper is lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from kazoo.exceptions import ConnectionLoss

from fencing_sdk import BackendUnavailableError
from fencing_sdk._claim import Claim
from fencing_sdk.backends.zookeeper import _requests, from_url
from fencing_sdk.backends.zookeeper._session import UnconnectedError

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
    asked = session.call(_requests.create_persistent("/late", _requests.ANYBODY))
    assert not asked.done()
    await asyncio.to_thread(server.start)
    with pytest.raises((UnconnectedError, ConnectionLoss)):
        await asked
    async with asyncio.timeout(20.0):
        assert await session.settled()
        assert await session.call(_requests.exists("/late")) is None
