"""
The ZooKeeper backend keeps the contract on an ensemble of three.

The promises that wait for a ttl or for an outage are campaigns here: every run plays them on one server, see
``test_zookeeper.py``, and what becomes of a lease when members of an ensemble die, see ``test_zookeeper_failover.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from zookeeper_promises import ZooKeeperPromises
from zookeeper_server import ZooKeeperEnsemble, fresh_root, require_zookeeper

from fencing_sdk import BackendUnavailableError
from fencing_sdk.abc import Backend, Claim, Grant, Held, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["zookeeper_fixtures"]

T = TypeVar("T")

WAITING = {"expire", "freed", "pass_time", "break_store", "_granted_again", "_renewed_late", "_held_beyond", "_kept"}
"""What a promise calls that waits for seconds."""


@pytest.fixture(scope="module")
def _shared_ensemble() -> Iterator[ZooKeeperEnsemble]:
    """One whose members do not part while a busy machine stands still: no test of this module freezes one."""
    require_zookeeper()
    with ZooKeeperEnsemble(sync_ticks=100) as ensemble:
        yield ensemble


class AsksAgain(ZooKeeperBackend):
    """
    A backend whose calls are made again when the connection broke under them, as the engine does.

    A member that owes an answer for a while is left for another one. A busy machine makes members owe answers.
    """

    async def acquire(self, claim: Claim) -> Grant | Held:
        return await _again(lambda: super(AsksAgain, self).acquire(claim))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        return await _again(lambda: super(AsksAgain, self).renew(claims))

    async def release(self, claim: Claim) -> None:
        await _again(lambda: super(AsksAgain, self).release(claim))

    async def inspect(self, name: str) -> Holder | None:
        return await _again(lambda: super(AsksAgain, self).inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        return await _again(lambda: super(AsksAgain, self).holders(name))

    async def list_held(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        return await _again(lambda: super(AsksAgain, self).list_held(prefix, cursor, limit))

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        return await _again(lambda: super(AsksAgain, self).list_waiters(name))


async def _again(call: Callable[[], Awaitable[T]]) -> T:
    for _ in range(2):
        with contextlib.suppress(BackendUnavailableError):
            return await call()
    return await call()


def _asking_again(url: str) -> ZooKeeperBackend:
    made = from_url(url)
    made.__class__ = AsksAgain
    return made


class TestZooKeeperEnsemble(ZooKeeperPromises, BackendSuite):
    make = staticmethod(_asking_again)
    ttl = 6.0
    """A connection that owes an answer for a twelfth of it is left, so that a busy machine must not need as long."""

    @pytest.fixture(autouse=True)
    def url(self, zookeeper_ensemble: ZooKeeperEnsemble) -> str:
        self.own_ensemble = zookeeper_ensemble
        self.own_url = f"{zookeeper_ensemble.url}{fresh_root()}?connect_timeout=0.5"
        return self.own_url

    @pytest.fixture(autouse=True)
    def a_request_may_take_longer_than_the_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A member of a busy machine stands still for more than a second now and then, which is no refusal."""
        monkeypatch.setattr("fencing_sdk._engine.terms._LAST_CALL", 60.0)

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
