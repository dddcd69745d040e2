"""The ZooKeeper backend keeps the contract, and answers as the rules do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from inside import LAST_CALL
from own_server import OwnServer
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper

from fencing_sdk.abc import Backend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.comparison import Comparison
from fencing_sdk.testing.promises.under_test import Reopen

pytest_plugins = ["zookeeper_fixtures"]


class AsksAgain:
    """
    A backend whose calls are made again when the connection broke under them, as the engine does.

    A server that owes an answer for a while is left for another connection. A busy machine makes servers owe answers.
    """

    tries = 3

    def __init__(self, backend: ZooKeeperBackend, settled: Sequence[ZooKeeperBackend] = ()) -> None:
        self.asked = backend
        self._settled = settled
        """Backends whose turns are written after each call, as far as they have come."""

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self.asked, name)
        if name not in {"draw", "keep", "give_back", "end", "tickets", "names"}:
            return asked

        async def again(*arguments: Any, **options: Any) -> Any:
            for _ in range(self.tries - 1):
                with contextlib.suppress(BackendUnavailableError):
                    return await self._settle(asked(*arguments, **options), arguments[0])
            return await self._settle(asked(*arguments, **options), arguments[0])

        return again

    async def _settle(self, answer: Awaitable[Any], about: Any) -> Any:
        outcome = await answer
        while isinstance(about, list | tuple):  # a ticket to keep, or names
            about = about[0] if about else None
        for backend in self._settled:
            name = getattr(about, "name", about)
            if (line := backend._tickets._lines.get(name)) is not None:
                session = next(iter(line.by_mark.values())).session
                await backend._tickets._settle(session, name, await backend._recipe.look(session, name))
        return outcome


@pytest.fixture(scope="module")
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A server for this module, which the tests kill."""
    require_zookeeper()
    with ZooKeeperServer() as server:
        yield server


class TestZooKeeperBackend(OwnServer, BackendSuite):
    ttl = 0.5
    bell_lag = 0.2
    expiry_lag = 2.0  # the client deletes the node at once; the rest is for a machine that stands still
    keeps_alone = False  # a node lasts for as long as its session, whose timeout was fixed when that began

    @pytest.fixture(autouse=True)
    def a_request_may_take_longer_than_the_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server of a busy machine stands still for more than a second now and then, which is not a refusal."""
        monkeypatch.setattr(LAST_CALL, 60.0)

    @pytest.fixture(autouse=True)
    def server(self, own_zookeeper: ZooKeeperServer) -> ZooKeeperServer:
        self.own_server = own_zookeeper
        return own_zookeeper

    @pytest.fixture
    def url(self, server: ZooKeeperServer) -> str:
        return f"{server.url}{fresh_root()}?connect_timeout=0.5"

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], Any]:
        return lambda: AsksAgain(from_url(url))

    @pytest.fixture
    async def backend(self, reopen: Reopen) -> AsyncIterator[Any]:
        async with aclosing(reopen()) as made:
            yield made

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill the server, and ask in vain once only: each time takes a second."""
        backend.tries = 1
        async with super().break_store(backend):
            yield
        backend.tries = AsksAgain.tries

    @pytest.mark.parametrize("part", range(4))
    async def test_it_answers_as_the_rules(self, part: int, url: str):
        """Each client writes the turns of its own readers and permits: here, after each call of either."""
        async with aclosing(from_url(url)) as one, aclosing(from_url(url)) as other:
            stores = [AsksAgain(each, [one, other]) for each in (one, other)]
            for seed in range(part, self.histories, 4):
                await Comparison(stores, seed).play()
