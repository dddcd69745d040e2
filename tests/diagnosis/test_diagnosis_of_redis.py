"""Redis: each misconfiguration is planted on a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, WARNING, found
from redis_cluster import Cluster
from redis_quorum import Quorum
from redis_replicas import Replicated
from redis_sentinels import Sentinels
from redis_server import RedisServer

from fencing_sdk.diagnosis.checks import judged
from fencing_sdk.diagnosis.redis import OF_SERVER, RedisFacts

if TYPE_CHECKING:
    from redis_fixtures import StartRedis

pytest_plugins = ["redis_fixtures"]

SOUND = {"appendonly": True, "appendfsync": "always", "requirepass": "secret"}


def url_of(server: RedisServer, login: str = ":secret@", host: str = "127.0.0.1") -> str:
    return f"redis://{login}{host}:{server.port}"


async def test_nothing_is_found_on_a_sound_server(start_redis: StartRedis):
    server = await asyncio.to_thread(start_redis, **SOUND)
    assert await found(url_of(server)) == {}
    kept = [key for key in server.ask("KEYS", "*") if server.ask("TTL", key) < 0]
    assert not kept, "a key that does not expire is left behind"
    assert not [key for key in server.ask("KEYS", "*") if server.ask("TYPE", key) == "zset"]


PLANTED = {
    "eviction of leases": ({"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru"}, "redis.eviction", ERROR),
    "eviction without a limit": ({"maxmemory_policy": "volatile-ttl"}, "redis.eviction", WARNING),
    "nothing is saved": ({"appendonly": False}, "redis.persistence", WARNING),
    "saved when the system likes": ({"appendfsync": "no"}, "redis.appendfsync", WARNING),
    "replicas are demanded, and none is there": ({"min_replicas_to_write": 1}, "self-test.acquire", ERROR),
    "a replica": ({"replicaof": "127.0.0.1 1"}, "store.reachable", ERROR),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_setting_that_breaks_a_promise_is_found(start_redis: StartRedis, planted: str):
    settings, check, severity = PLANTED[planted]
    server = await asyncio.to_thread(start_redis, **SOUND | settings)
    findings = await found(url_of(server))
    assert findings[check].severity == severity
    assert all(finding.reason and finding.fix for finding in findings.values())


@pytest.mark.parametrize(
    ("settings", "check"),
    [({"appendonly": False}, "redis.persistence"), ({"appendfsync": "everysec"}, "redis.appendfsync")],
)
async def test_a_forgetful_server_is_an_error_for_plain_counters(start_redis: StartRedis, settings, check: str):
    server = await asyncio.to_thread(start_redis, **SOUND | settings)
    assert (await found(url_of(server), tokens="counter"))[check].severity == ERROR


RULES = "~{fencing:* &* +@all"


async def test_missing_permissions_are_found(start_redis: StartRedis):
    users = [
        "none on >x ~other:* &* +@all",
        f"quiet on >x {RULES} -@dangerous -@admin +info",
        "deaf on >x ~{fencing:* +@all resetchannels",
    ]
    server = await asyncio.to_thread(start_redis, **SOUND, user=users)
    keys = await found(url_of(server, "none:x@"))
    assert keys["self-test.acquire"].severity == ERROR
    quiet = await found(url_of(server, "quiet:x@"))
    assert {check: each.severity for check, each in quiet.items()} == {"redis.settings": WARNING}
    deaf = await found(url_of(server, "deaf:x@"))
    assert deaf["self-test.wake"].severity == WARNING


async def test_a_wrong_password_is_a_finding_without_the_password(start_redis: StartRedis):
    server = await asyncio.to_thread(start_redis, **SOUND)
    findings = await found(url_of(server, ":hunter2@"))
    assert findings["store.reachable"].severity == findings["redis.host"].severity == ERROR
    assert "hunter2" not in repr(findings)


async def test_a_server_that_is_down_or_hangs_is_found_in_bounded_time(start_redis: StartRedis):
    server = await asyncio.to_thread(start_redis, **SOUND)
    server.pause()
    async with asyncio.timeout(40):
        assert (await found(url_of(server)))["store.reachable"].severity == ERROR
    server.kill()
    assert {"store.reachable", "redis.host"} == set(await found(url_of(server)))


async def test_replicas_that_no_client_waits_for_are_found(redis_binary: str):
    async with Replicated(binary=redis_binary, **SOUND, masterauth="secret") as group:
        findings = await found(url_of(group.master))
        assert findings["redis.replicas"].severity == WARNING
        assert "min_replicas=1" in findings["redis.replicas"].fix
        assert "while that replica is away: add a second one" in findings["redis.replicas"].fix
        waited_for = await found(url_of(group.master), min_replicas=1)
        assert not [check for check in waited_for if check.startswith("redis.")]
        assert (await found(url_of(group.master), min_replicas=2))["self-test.acquire"].severity == ERROR


async def test_sentinels(redis_sentinels: Sentinels):
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in redis_sentinels.sentinels)
    url, ttl = f"redis+sentinel://{hosts}/{redis_sentinels.name}", 15.0
    expected = {"redis.persistence", "redis.replicas"}
    assert set(await found(url, ttl=ttl)) == expected
    for sentinel in redis_sentinels.sentinels:
        sentinel.ask("SENTINEL", "SET", redis_sentinels.name, "quorum", 5, "down-after-milliseconds", 30000)
    try:
        findings = await found(url, ttl=ttl)
    finally:
        for sentinel in redis_sentinels.sentinels:
            sentinel.ask("SENTINEL", "SET", redis_sentinels.name, "quorum", 2, "down-after-milliseconds", 2000)
    assert findings["redis.sentinel-quorum"].severity == ERROR
    assert findings["redis.sentinel-down-after"].severity == WARNING
    redis_sentinels.sentinels[0].ask("SENTINEL", "SET", redis_sentinels.name, "quorum", 1)
    assert (await found(url, ttl=ttl))["redis.sentinel-quorum"].severity == WARNING
    redis_sentinels.sentinels[0].ask("SENTINEL", "SET", redis_sentinels.name, "quorum", 2)
    redis_sentinels.sentinels[2].pause()
    assert (await found(url, ttl=ttl))["redis.sentinel"].severity == WARNING


async def test_a_cluster(redis_cluster: Cluster):
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in redis_cluster.nodes)
    assert set(await found(url)) == {"redis.persistence"}
    redis_cluster.nodes[0].ask("CLUSTER", "DELSLOTS", 7)
    try:
        assert (await found(url))["redis.cluster-coverage"].severity == ERROR
    finally:
        redis_cluster.nodes[0].ask("CLUSTER", "ADDSLOTS", 7)
    redis_cluster.nodes[1].pause()
    assert (await found(url))["redis.host"].severity == WARNING


async def test_a_quorum(redis_quorum: Quorum):
    assert (await found(redis_quorum.url))["redis.appendfsync"].severity == ERROR
    for node in redis_quorum.nodes:
        node.ask("CONFIG", "SET", "appendfsync", "always")
    try:
        assert await found(redis_quorum.url) == {}
        same = [redis_quorum.nodes[0].port, redis_quorum.nodes[1].port]
        url = f"redis+quorum://127.0.0.1:{same[0]},localhost:{same[0]},127.0.0.1:{same[1]}"
        assert (await found(url))["redis.quorum"].severity == ERROR
        redis_quorum.nodes[2].pause()
        assert (await found(redis_quorum.url))["redis.host"].severity == WARNING
    finally:
        redis_quorum.heal()
        for node in redis_quorum.nodes:
            node.ask("CONFIG", "SET", "appendfsync", "everysec")


def test_a_node_of_a_quorum_need_not_demand_replicas():
    info = {"redis_version": "7.0.15", "role": "master", "slave0": "ip=a,port=1,state=online,offset=1,lag=0"}
    alone, voting = (judged(OF_SERVER, RedisFacts("a:1", info, {}, votes=votes)) for votes in (False, True))
    (one,), (other,) = ([each.fix for each in all_of if each.check == "redis.replicas"] for all_of in (alone, voting))
    assert "min_replicas=1" in one
    assert "min_replicas" not in other


async def test_a_service_without_any_sentinel_is_found():
    findings = await found("redis+sentinel://127.0.0.1:1/fencing")
    assert findings["store.reachable"].severity == ERROR
    assert findings["redis.sentinel"].severity == WARNING
