"""Kahuna: misconfigurations of the cluster, and nodes that are down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, NOTE, WARNING, found
from kahuna_server import UPSTREAMS

from fencing_sdk.backends.kahuna.options import read_nodes
from fencing_sdk.diagnosis.kahuna import diagnose_nodes

if TYPE_CHECKING:
    from kahuna_server import KahunaServer

pytest_plugins = ["kahuna_fixtures"]
pytestmark = pytest.mark.skipif(bool(UPSTREAMS), reason="a real cluster is not set up wrongly for a test")


async def test_nothing_is_found_on_a_sound_cluster(kahuna_cluster: KahunaServer):
    assert await found(kahuna_cluster.url) == {}


async def test_what_puts_exclusion_at_stake_is_found(kahuna_cluster: KahunaServer):
    await asyncio.to_thread(kahuna_cluster.cluster, replication_factor=3)
    findings = await found(kahuna_cluster.url)
    assert findings["kahuna.settings"].severity == ERROR
    assert "replicationFactor" in findings["kahuna.settings"].what
    await asyncio.to_thread(kahuna_cluster.cluster, replication_factor=0)
    findings = await found(kahuna_cluster.url, durability="ephemeral")
    assert "ephemeral" in findings["kahuna.settings"].what


async def test_a_single_node_is_found(kahuna_server: KahunaServer):
    findings = await found(kahuna_server.url)
    assert {check: each.severity for check, each in findings.items()} == {"kahuna.nodes": WARNING}


async def test_a_node_that_is_down_is_found(kahuna_cluster: KahunaServer):
    findings = await found(f"{kahuna_cluster.url},127.0.0.1:1")
    assert findings["kahuna.host"].severity == WARNING
    alone = await found("kahuna://127.0.0.1:1")
    assert alone["kahuna.host"].severity == alone["store.reachable"].severity == ERROR


async def test_nodes_that_are_not_ready_or_not_encrypted_are_found():
    async def ask(_url: object) -> dict[str, object]:
        return {"ready": False}

    nodes = read_nodes(["a", "b", "c"], tls=False).in_turn()
    findings = {finding.check: finding.severity for finding in await diagnose_nodes(nodes, ask, "persistent")}
    assert findings == {"kahuna.ready": WARNING, "kahuna.tls": NOTE}
