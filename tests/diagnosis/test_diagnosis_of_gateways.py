"""etcd and Kahuna: each misconfiguration is planted on a real server, or on the stand-in for Kahuna."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, WARNING, found
from etcd_server import EtcdCluster, b64
from kahuna_server import UPSTREAMS

from fencing_sdk.diagnosis.checks import judged
from fencing_sdk.diagnosis.gateways import OF_ALARMS, OF_VERSION, corrupted

if TYPE_CHECKING:
    from etcd_fixtures import StartEtcd
    from kahuna_server import KahunaServer

pytest_plugins = ["etcd_fixtures", "kahuna_fixtures"]
needs_stand_in = pytest.mark.skipif(bool(UPSTREAMS), reason="a real cluster is not set up wrongly for a test")


async def test_nothing_but_its_version_is_found_on_a_sound_etcd(etcd_cluster: EtcdCluster):
    assert set(await found(etcd_cluster.url)) <= {"etcd.version"}  # the package may have a known defect
    assert not etcd_cluster.keys()


async def test_a_login_that_is_refused_is_found_without_its_password(start_etcd: StartEtcd):
    server = await asyncio.to_thread(start_etcd, 3)
    await asyncio.to_thread(server.enable_auth, user="app", password="secret")
    url = server.url.replace("etcd://", "etcd://app:{}@")
    assert set(await found(url.format("secret"))) <= {"etcd.version"}
    refused = await found(url.format("hunter2"))
    assert refused["store.reachable"].severity == ERROR
    assert "hunter2" not in repr(refused)
    denied = await found(url.format("secret"), prefix="elsewhere/")
    assert ERROR in {each.severity for each in denied.values()}


async def test_a_member_that_is_down_is_found(etcd_cluster: EtcdCluster):
    etcd_cluster.members[2].kill()
    assert (await found(etcd_cluster.url))["etcd.host"].severity == WARNING
    etcd_cluster.members[1].pause()
    async with asyncio.timeout(90):
        findings = await found(etcd_cluster.url)
    assert findings["store.reachable"].severity == findings["etcd.host"].severity == ERROR


async def test_space_that_ran_out_is_found(start_etcd: StartEtcd):
    server = await asyncio.to_thread(start_etcd, quota_backend_bytes=1_000_000)
    with pytest.raises(Exception, match="space exceeded"):
        for number in range(100):
            await server.command("kv/put", {"key": b64(f"filler/{number}"), "value": b64("x" * 50_000)})
    assert (await found(server.url))["self-test.acquire"].severity == ERROR


@pytest.mark.parametrize(
    ("version", "severity", "risk"),
    [
        ("3.3.25", WARNING, "crash"),
        ("3.4.21", WARNING, "crash"),
        ("3.4.22", WARNING, "frozen"),
        ("3.4.30", WARNING, "frozen"),
        ("3.4.31", None, ""),
        ("3.5.1", ERROR, "crash"),
        ("3.5.5", WARNING, "crash"),
        ("3.5.6", WARNING, "frozen"),
        ("3.5.12", WARNING, "frozen"),
        ("3.5.13", None, ""),
        ("3.6.0", None, ""),
        ("", None, ""),
    ],
)
def test_versions_with_known_defects_are_found(version: str, severity, risk: str):
    findings = judged(OF_VERSION, version)
    assert [(each.check, each.severity) for each in findings] == ([("etcd.version", severity)] if severity else [])
    assert all(risk in finding.reason for finding in findings)


def test_corruption_is_found():
    alarms = {"a": {"alarms": [{"alarm": "NOSPACE"}, {"alarm": "CORRUPT"}]}, "b": {}, "c": OSError()}
    (finding,) = judged(OF_ALARMS, corrupted(alarms))
    assert (finding.check, finding.severity, finding.what) == ("etcd.alarm", ERROR, "the alarm CORRUPT is on")
    assert not judged(OF_ALARMS, corrupted({"a": {"alarms": [{"alarm": "NOSPACE"}]}}))


@needs_stand_in
async def test_kahuna_settings_that_put_exclusion_at_stake_are_found(kahuna_cluster: KahunaServer):
    assert await found(kahuna_cluster.url) == {}
    await asyncio.to_thread(kahuna_cluster.cluster, replication_factor=3)
    findings = await found(kahuna_cluster.url)
    assert findings["kahuna.settings"].severity == ERROR
    assert "replicationFactor" in findings["kahuna.settings"].what


@needs_stand_in
async def test_a_kahuna_node_that_is_down_is_found(kahuna_cluster: KahunaServer):
    assert (await found(f"{kahuna_cluster.url},127.0.0.1:1"))["kahuna.host"].severity == WARNING
    alone = await found("kahuna://127.0.0.1:1")
    assert alone["kahuna.host"].severity == alone["store.reachable"].severity == ERROR
