"""ZooKeeper: every misconfiguration is planted on a real server, and found by the name of its check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, NOTE, WARNING, found
from zookeeper_server import ZooKeeperEnsemble, fresh_root

from fencing_sdk.backends.zookeeper.connection.driver import ZooKeeperSettings
from fencing_sdk.diagnosis.checks import judged
from fencing_sdk.diagnosis.zookeeper import MAJORITY, OF_ENSEMBLE, OF_SERVER, EnsembleFacts, ServerFacts, group_of

if TYPE_CHECKING:
    from zookeeper_fixtures import StartZooKeeper

pytest_plugins = ["zookeeper_fixtures"]


PATIENT = "?connect_timeout=20"
"""For servers that are up: a machine may stand still."""


def url_of(addresses: list[str], login: str = "app:secret@", options: str = PATIENT) -> str:
    return f"zk://{login}{','.join(addresses)}{fresh_root()}{options}"


async def test_nothing_is_found_on_a_sound_ensemble(zookeeper_ensemble: ZooKeeperEnsemble):
    assert await found(url_of(zookeeper_ensemble.addresses)) == {}


async def test_what_a_client_leaves_out_is_noted(zookeeper_ensemble: ZooKeeperEnsemble):
    findings = await found(url_of(zookeeper_ensemble.addresses[:1], login=""))
    severities = {check: each.severity for check, each in findings.items()}
    assert severities == {"zookeeper.authentication": NOTE, "zookeeper.hosts": NOTE}


async def test_members_that_are_down_are_found(zookeeper_ensemble: ZooKeeperEnsemble):
    url = url_of(zookeeper_ensemble.addresses, options="")  # at the end none is up, which is told after the timeout
    followers = await asyncio.to_thread(lambda: zookeeper_ensemble.followers)
    followers[0].kill()
    assert (await found(url))["zookeeper.host"].severity == WARNING
    followers[1].kill()
    async with asyncio.timeout(90):
        findings = await found(url)
    assert findings["zookeeper.host"].severity == ERROR
    assert findings["store.reachable"].severity == ERROR


PLANTED = {
    "sessions that are too long": ("minSessionTimeout=60000", "zookeeper.session", WARNING),
    "sessions that are too short": ("maxSessionTimeout=5000", "zookeeper.session", WARNING),
    "words that are not allowed": ("4lw.commands.whitelist=srvr", "zookeeper.words", NOTE),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_setting_that_breaks_a_promise_is_found(start_zookeeper: StartZooKeeper, planted: str):
    line, check, severity = PLANTED[planted]
    server = await asyncio.to_thread(start_zookeeper, settings=[line])
    findings = await found(url_of([server.address]))
    assert {each: findings[each].severity for each in findings} == {"zookeeper.ensemble": WARNING, check: severity}
    assert all(finding.reason and finding.fix for finding in findings.values())


def test_an_old_version_and_an_even_number_of_members_are_found():
    lines = "".join(f"server.{number}=h{number}:2888:3888:participant\n" for number in range(4))
    old = ServerFacts("a:2181", "Zookeeper version: 3.4.14-4c25d\nMode: follower\n", lines)
    assert [(each.check, each.severity) for each in judged(OF_SERVER, old)] == [("zookeeper.version", ERROR)]
    (even,) = judged(MAJORITY, group_of([old] * 4))
    assert (even.check, even.severity, "4 voting members" in even.what) == ("zookeeper.ensemble", NOTE, True)


def test_an_open_connection_over_a_network_is_noted():
    settings = ZooKeeperSettings([("zk1", 2181)], "/fencing", 1.0, acl=())
    over_a_network = judged(OF_ENSEMBLE, EnsembleFacts(settings, [ServerFacts("zk1:2181", None)]))
    assert [(each.check, each.severity) for each in over_a_network] == [("zookeeper.tls", NOTE)]
    here = [ServerFacts(address, None) for address in ("127.0.0.1:2181", "[::1]:2181")]
    assert not judged(OF_ENSEMBLE, EnsembleFacts(settings, here))
