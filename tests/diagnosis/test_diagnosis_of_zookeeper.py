"""ZooKeeper: each misconfiguration is planted on a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, WARNING, found
from zookeeper_server import ZooKeeperEnsemble, fresh_root

if TYPE_CHECKING:
    from zookeeper_fixtures import StartZooKeeper

pytest_plugins = ["zookeeper_fixtures"]


PATIENT = "?connect_timeout=20"
"""For servers that are up: a machine may stand still."""


def url_of(addresses: list[str], login: str = "app:secret@", options: str = PATIENT) -> str:
    return f"zk://{login}{','.join(addresses)}{fresh_root()}{options}"


async def test_nothing_is_found_on_a_sound_ensemble(zookeeper_ensemble: ZooKeeperEnsemble):
    assert await found(url_of(zookeeper_ensemble.addresses)) == {}


async def test_members_that_are_down_are_found(zookeeper_ensemble: ZooKeeperEnsemble):
    url = url_of(zookeeper_ensemble.addresses, options="")  # at the end none is up, and opening lasts until the timeout
    followers = await asyncio.to_thread(lambda: zookeeper_ensemble.followers)
    followers[0].kill()
    assert (await found(url))["zookeeper.host"].severity == WARNING
    followers[1].kill()
    async with asyncio.timeout(90):
        findings = await found(url)
    assert findings["zookeeper.host"].severity == ERROR
    assert findings["store.reachable"].severity == ERROR


@pytest.mark.parametrize("line", ["minSessionTimeout=60000", "maxSessionTimeout=5000"])
async def test_sessions_that_do_not_fit_the_ttl_are_found(start_zookeeper: StartZooKeeper, line: str):
    server = await asyncio.to_thread(start_zookeeper, settings=[line])
    findings = await found(url_of([server.address]))
    assert {check: each.severity for check, each in findings.items()} == {"zookeeper.session": WARNING}
