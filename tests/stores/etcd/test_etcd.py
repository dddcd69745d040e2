"""The etcd backend keeps the contract, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from etcd_server import EtcdCluster
from own_server import OwnServer
from patience import wait_until

from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["etcd_fixtures"]


@pytest.fixture(scope="module")
def own_etcd(etcd_binary: str) -> Iterator[EtcdCluster]:
    """A server for this module, which is killed and started again."""
    with EtcdCluster() as cluster:
        yield cluster


class TestEtcdBackend(OwnServer, BackendSuite):
    redraws = False
    ttl = 0.5
    bell_lag = 0.2
    expiry_lag = 4.0
    """A lease of whole seconds is half a second longer, etcd looks twice a second, and the machine may stand still."""

    @pytest.fixture(autouse=True)
    def server(self, own_etcd: EtcdCluster) -> EtcdCluster:
        own_etcd.clear()
        self.own_server = own_etcd
        return own_etcd

    @pytest.fixture
    def url(self, server: EtcdCluster) -> str:
        return f"{server.url}?connect_timeout=20"  # a machine may stand still

    async def expire(self, ttl: float) -> None:
        """Let the ttl pass, and etcd end the leases of that length: it looks for them twice a second."""
        await self.pass_time(ttl)
        await asyncio.to_thread(wait_until, lambda: not self._short_keys(ttl), what="the leases end")

    def _short_keys(self, ttl: float) -> list[str]:
        """The keys on leases that are as short as those for *ttl*, which are rounded up and half a second longer."""
        lengths = {lease: self.own_server.ask("lease/timetolive", {"ID": lease}) for lease in self.own_server.leases()}
        short = {lease for lease, heard in lengths.items() if int(heard.get("grantedTTL", 0)) < ttl + 2}
        return [key for key, kv in self.own_server.keys().items() if kv.get("lease") in short]

    async def purge(self, backend: EtcdBackend) -> None:
        """Let etcd forget its history."""
        await asyncio.to_thread(self.own_server.compact)
