"""etcd, ZooKeeper and Kahuna are found although the first address of their name swallows packets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from etcd_server import EtcdCluster
from kahuna_server import KahunaServer
from local_ports import HOST
from zookeeper_server import ZooKeeperServer

from fencing_sdk import connect
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.kahuna import KahunaGuard

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "zookeeper_fixtures",
]

NAME = "localhost"
"""For this name the certificates of the tests are made."""
OTHER = "stores.test"
"""For a driver that resolves "localhost" in a way of its own."""
SILENT = "127.0.0.2"


@dataclass(frozen=True)
class Place:
    """A store by its name, and the ports that have to be found."""

    url: str
    ports: list[int]


@contextmanager
def swallowing(port: int) -> Iterator[None]:
    """Let *port* of the first address take no connection, and refuse it neither: its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((SILENT, port))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.0)
            filler.connect_ex((SILENT, port))
        yield


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `NAME` and `OTHER` have two addresses, of which the first is `SILENT`."""
    resolve: Callable[..., list[tuple[object, ...]]] = socket.getaddrinfo

    def resolved(host: object, *arguments: object, **options: object) -> list[tuple[object, ...]]:
        if host not in (NAME, OTHER):
            return resolve(host, *arguments, **options)
        return [*resolve(SILENT, *arguments, **options), *resolve(HOST, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


class AddressesSuite:
    async def test_an_address_that_swallows_packets_hides_no_other(self, place: Place, two_addresses: None):
        with ExitStack() as stack:
            for port in place.ports:
                stack.enter_context(swallowing(port))
            async with asyncio.timeout(60), connect(place.url) as locks, locks.lock("a", ttl=30) as lease:
                assert lease.held


class WithGuardSuite(AddressesSuite):
    guard: Callable[[str], EtcdGuard | KahunaGuard]

    async def test_it_hides_none_from_a_guard(self, place: Place, two_addresses: None):
        guard = self.guard(place.url)
        with ExitStack() as stack:
            for port in place.ports:
                stack.enter_context(swallowing(port))
            async with asyncio.timeout(60):
                await guard.raise_to("a", 34)
                assert await guard.highest("a") == 34
        await guard.aclose()


class TestEtcd(WithGuardSuite):
    guard = EtcdGuard

    @pytest.fixture
    def place(self, etcd_server: EtcdCluster) -> Place:
        return Place(etcd_server.url.replace(HOST, NAME), [int(etcd_server.url.rpartition(":")[2])])


class TestZooKeeper(AddressesSuite):
    @pytest.fixture
    def place(self, zookeeper_server: ZooKeeperServer, zookeeper_url: str) -> Place:
        return Place(zookeeper_url.replace(HOST, NAME), [int(zookeeper_server.address.rpartition(":")[2])])


class TestKahuna(WithGuardSuite):
    guard = KahunaGuard

    @pytest.fixture
    def place(self, kahuna_server: KahunaServer) -> Place:
        return Place(kahuna_server.url.replace(HOST, NAME), list(kahuna_server.ports))
