"""
The ZooKeeper backend keeps the contract on an ensemble of three.

The promises that wait for a ttl or for an outage are campaigns here: every run plays them on one server, see
``test_zookeeper.py``, and what becomes of a lease when members of an ensemble die, see ``test_zookeeper_failover.py``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from zookeeper_promises import ZooKeeperPromises, asking_again
from zookeeper_server import ZooKeeperEnsemble, fresh_root, require_zookeeper

from fencing_sdk.abc import Backend
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["zookeeper_fixtures"]

WAITING = {"expire", "freed", "pass_time", "break_store", "_granted_again", "_renewed_in_time", "_held_beyond", "_kept"}
"""What a promise calls that waits for seconds."""


@pytest.fixture(scope="module")
def _shared_ensemble() -> Iterator[ZooKeeperEnsemble]:
    """One whose members do not part while a busy machine stands still: no test of this module freezes one."""
    require_zookeeper()
    with ZooKeeperEnsemble(sync_ticks=100) as ensemble:
        yield ensemble


class TestZooKeeperEnsemble(ZooKeeperPromises, BackendSuite):
    make = staticmethod(asking_again)
    ttl = 6.0
    """A connection that owes an answer for a twelfth of it is left, so that a busy machine must not need as long."""

    @pytest.fixture(autouse=True)
    def url(self, zookeeper_ensemble: ZooKeeperEnsemble) -> str:
        self.own_ensemble = zookeeper_ensemble
        self.own_url = f"{zookeeper_ensemble.url}{fresh_root()}?connect_timeout=0.5"
        return self.own_url

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill all members."""
        for member in self.own_ensemble.members:
            await asyncio.to_thread(member.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_ensemble.heal)


def _campaign(promise: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Make a copy of the promise, marked: the promise itself is that of every store."""

    @functools.wraps(promise)
    async def played(*arguments: object, **fixtures: object) -> None:
        await promise(*arguments, **fixtures)

    return pytest.mark.campaign(only=True)(played)


for _name, _promise in inspect.getmembers(TestZooKeeperEnsemble, inspect.isfunction):
    if _name.startswith("test_") and WAITING & set(_promise.__code__.co_names):
        setattr(TestZooKeeperEnsemble, _name, _campaign(_promise))
