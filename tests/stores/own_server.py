"""The fixtures of a contract suite whose tests may kill the server of the store and start it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from fencing_sdk.abc import Backend
from fencing_sdk.backends import from_url
from fencing_sdk.testing.promises.under_test import BackendUnderTest, Reopen


class OwnServer(BackendUnderTest):
    """Before `BackendSuite`. The class brings the fixture ``server``: it clears the store, and sets `own_server`."""

    own_server: Any

    @pytest.fixture
    def url(self, server: Any) -> str:
        return server.url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], Backend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Reopen) -> AsyncIterator[Backend]:
        async with aclosing(reopen()) as made:
            await self.ready(made)
            yield made

    async def ready(self, backend: Backend) -> None:
        """Wait until a new client knows all of its servers."""

    def kill(self) -> None:
        self.own_server.kill()

    def start(self) -> None:
        self.own_server.start()

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill the server."""
        await asyncio.to_thread(self.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.start)

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the server too, by force."""
        await asyncio.to_thread(self.kill)
        await asyncio.to_thread(self.start)
        restarted = await super().restart(backend, reopen)
        await self.ready(restarted)
        return restarted
