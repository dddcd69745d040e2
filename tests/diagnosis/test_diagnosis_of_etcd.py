"""etcd: every misconfiguration is planted on a real server, and found by the name of its check."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, NOTE, WARNING, found
from etcd_server import EtcdCluster, b64

from fencing_sdk.diagnosis.checks import Group, judged
from fencing_sdk.diagnosis.etcd import MAJORITY, OF_CLUSTER, OF_MEMBER, ClusterFacts, MemberFacts

if TYPE_CHECKING:
    from etcd_fixtures import StartEtcd

    from fencing_sdk.diagnosis import Finding

pytest_plugins = ["etcd_fixtures"]


def installed() -> tuple[int, ...]:
    said = subprocess.run(["etcd", "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in said.split()[2].split("."))


def of_member(**state: str) -> list[Finding]:
    return judged(OF_MEMBER, MemberFacts({"leader": "17", **state}))


def always() -> set[str]:
    """What is found on every server of the tests: they want no login, and the package may have a known defect."""
    return {
        "etcd.authentication",
        *(finding.check for finding in of_member(version=".".join(map(str, installed())))),
    }


async def test_nothing_else_is_found_on_a_sound_cluster(etcd_cluster: EtcdCluster):
    findings = await found(etcd_cluster.url)
    assert set(findings) == always()
    assert findings["etcd.authentication"].severity == NOTE
    assert not etcd_cluster.keys()


async def test_a_login_is_seen(start_etcd: StartEtcd):
    server = await asyncio.to_thread(start_etcd, 3)
    await asyncio.to_thread(server.enable_auth, user="app", password="secret")
    url = server.url.replace("etcd://", "etcd://app:{}@")
    findings = await found(url.format("secret"))
    assert "etcd.authentication" not in findings
    assert not [each for each in findings.values() if each.severity == ERROR]
    refused = await found(url.format("hunter2"))
    assert refused["store.reachable"].severity == ERROR
    assert "hunter2" not in repr(refused)
    denied = await found(url.format("secret"), prefix="elsewhere/")
    assert ERROR in {each.severity for each in denied.values()}


async def test_a_single_member_is_found(etcd_server: EtcdCluster):
    findings = await found(etcd_server.url)
    assert set(findings) == always() | {"etcd.members"}
    assert findings["etcd.members"].severity == WARNING


async def test_a_member_that_is_down_or_not_named_is_found(etcd_cluster: EtcdCluster):
    one = f"etcd://127.0.0.1:{etcd_cluster.members[0].port}"
    assert (await found(one))["etcd.endpoints"].severity == NOTE
    etcd_cluster.members[2].kill()
    assert (await found(etcd_cluster.url))["etcd.host"].severity == WARNING
    etcd_cluster.members[1].pause()
    async with asyncio.timeout(90):
        findings = await found(etcd_cluster.url)
    assert findings["store.reachable"].severity == ERROR
    assert findings["etcd.host"].severity == ERROR


async def test_space_that_runs_out_and_the_alarm_are_found(start_etcd: StartEtcd):
    server = await asyncio.to_thread(start_etcd, quota_backend_bytes=1_000_000)
    url = server.url
    with pytest.raises(Exception, match="space exceeded"):
        for number in range(100):
            await server.command("kv/put", {"key": b64(f"filler/{number}"), "value": b64("x" * 50_000)})
    findings = await found(url)
    assert findings["etcd.quota"].severity == WARNING
    assert findings["etcd.alarm"].severity == ERROR
    assert findings["self-test.acquire"].severity == ERROR


async def test_an_open_connection_over_a_network_is_noted(etcd_server: EtcdCluster):
    name = socket.gethostname()  # whatever address it has: it is not surely this machine's
    if not socket.gethostbyname(name).startswith("127.0.0.1"):
        pytest.skip("the server listens on loopback, where the name of this machine does not lead")
    assert (await found(f"etcd://{name}:{etcd_server.members[0].port}"))["etcd.tls"].severity == NOTE


@pytest.mark.parametrize(
    ("version", "severity"),
    [("3.4.30", WARNING), ("3.4.31", None), ("3.5.1", ERROR), ("3.5.12", WARNING), ("3.5.13", None), ("3.6.0", None)],
)
def test_versions_with_known_defects_are_found(version: str, severity):
    judged = [(each.check, each.severity) for each in of_member(version=version)]
    assert judged == ([("etcd.version", severity)] if severity else [])


@pytest.mark.parametrize(
    ("version", "risk"),
    [("3.3.25", "crash"), ("3.4.21", "crash"), ("3.4.22", "frozen"), ("3.5.5", "crash"), ("3.5.6", "frozen")],
)
def test_a_version_whose_members_may_differ_after_a_crash_is_told_so(version: str, risk: str):
    (finding,) = of_member(version=version)
    assert (finding.severity, risk in finding.reason) == (WARNING, True)


def test_a_member_without_leader_is_found():
    assert [(each.check, each.severity) for each in of_member(leader="0")] == [("etcd.leader", ERROR)]
    assert not of_member(leader="17")


def test_corruption_and_an_even_number_of_members_are_found():
    (alarm,) = judged(OF_CLUSTER, ClusterFacts(others="CORRUPT"))
    assert (alarm.check, alarm.severity, alarm.what) == ("etcd.alarm", ERROR, "the alarm CORRUPT is on")
    (even,) = judged(MAJORITY, Group(voters=4, members=4, named=4))
    assert (even.check, even.severity) == ("etcd.members", NOTE)
