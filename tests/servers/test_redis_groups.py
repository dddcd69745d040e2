"""The bench itself: groups of servers that fail over, and slots that move."""

import pytest
import redis
from fault_proxy import FaultProxy
from hiredis import ReplyError
from patience import until
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel
from redis_cluster import Cluster
from redis_replicas import Replicated, info
from redis_server import version_of

pytest_plugins = ["redis_fixtures"]


async def test_promotion_loses_the_writes_that_were_cut_off(redis_binary):
    async with Replicated(binary=redis_binary) as group:
        await group.master.command("SET", "kept", 1)
        await group.synced()
        group.cut_replication()
        await group.master.command("SET", "lost", 1)
        group.master.kill()
        master = await group.promote()
        assert await master.command("MGET", "kept", "lost") == ["1", None]
        assert await master.command("SET", "writable", 1) == "OK"


async def test_a_master_that_must_not_be_alone_refuses_to_write(redis_binary):
    async with Replicated(
        binary=redis_binary, min_replicas_to_write=1, requirepass="secret", masterauth="secret"
    ) as group:
        await group.synced()
        await until(lambda: info(group.master, "replication")["min_slaves_good_slaves"] == "1", what="it has confirmed")
        assert await group.master.command("SET", "kept", 1) == "OK"
        group.links[0].cut()
        group.links[0].refuse()
        await until(lambda: info(group.master, "replication")["connected_slaves"] == "0", what="the master is alone")
        with pytest.raises(ReplyError, match="NOREPLICAS"):
            await group.master.command("SET", "lost", 1)


async def test_sentinels_replace_a_master_that_was_killed(redis_sentinels):
    first = redis_sentinels.master
    await first.command("SET", "kept", 1)
    await first.command("WAIT", 1, 0)
    second = await redis_sentinels.failover()
    assert second is not first
    finder = Sentinel(redis_sentinels.addresses)
    assert finder.discover_master(redis_sentinels.name) == ("127.0.0.1", second.port)
    for sentinel in finder.sentinels:
        sentinel.close()
    assert await second.command("GET", "kept") == "1"
    redis_sentinels.heal()
    assert (first.ask("ROLE")[0], redis_sentinels.master) == ("slave", second)


async def test_sentinels_replace_a_master_that_is_paused_and_it_wakes_up_as_a_master(redis_sentinels):
    first = redis_sentinels.master
    first.pause()
    second = await redis_sentinels.replaced(first)
    assert second is not first
    first.resume()
    assert second.ask("SET", "written", 1) == "OK"


def test_a_slot_on_the_move_answers_ask_and_then_moved(redis_cluster):
    source, slot = redis_cluster.node_of("here"), redis_cluster.slot_of("here")
    target = redis_cluster.other_than(source)
    source.ask("SET", "here", 1)
    redis_cluster.start_move(slot, to=target)
    assert source.ask("GET", "here") == "1"
    with pytest.raises(ReplyError, match=f"ASK {slot} 127.0.0.1:{target.port}"):
        source.ask("GET", "{here}:absent")
    redis_cluster.finish_move(slot, to=target)
    with pytest.raises(ReplyError, match=f"MOVED {slot} 127.0.0.1:{target.port}"):
        source.ask("GET", "here")
    assert (target.ask("GET", "here"), redis_cluster.node_of("here")) == ("1", target)
    redis_cluster.heal()
    assert (source.ask("GET", "here"), redis_cluster.node_of("here")) == ("1", source)


def test_a_cluster_serves_its_clients_and_survives_a_lost_node(redis_cluster):
    with RedisCluster.from_url(redis_cluster.url, decode_responses=True) as driver:
        assert all(driver.set(f"key-{number}", number) for number in range(30))
    assert all(node.ask("DBSIZE") for node in redis_cluster.nodes)
    redis_cluster.nodes[0].kill()
    redis_cluster.heal()
    assert redis_cluster.nodes[0].ask("DBSIZE") == 0


async def test_clients_of_a_cluster_can_be_sent_through_proxies(redis_cluster, redis_binary):
    if version_of(redis_binary) < (7,):
        pytest.skip("older nodes do not change their own address")
    async with FaultProxy(redis_cluster.nodes[0].port) as a, FaultProxy(redis_cluster.nodes[1].port) as b:
        async with FaultProxy(redis_cluster.nodes[2].port) as c:
            await redis_cluster.announce([a, b, c])
            slots = redis_cluster.nodes[0].ask("CLUSTER", "SLOTS")
            assert {master[1] for _, _, master, *_ in slots} == {a.port, b.port, c.port}
            await redis_cluster.announce(None)


async def test_a_replica_of_a_cluster_takes_over(redis_binary):
    with Cluster(binary=redis_binary, replicas=1) as cluster:
        lost = cluster.node_of("kept")
        lost.ask("SET", "kept", 1)
        lost.ask("WAIT", 1, 0)
        master = await cluster.failover(lost)
        assert master in cluster.nodes[3:]
        assert master.ask("GET", "kept") == "1"
        assert cluster.node_of("kept") is master


def test_a_lost_slot_takes_the_cluster_down(redis_cluster):
    redis_cluster.nodes[0].ask("CLUSTER", "DELSLOTS", 0)
    with pytest.raises(redis.ResponseError) as down, redis.Redis(port=redis_cluster.nodes[0].port) as driver:
        driver.get("{06S}")
    redis_cluster.nodes[0].ask("CLUSTER", "ADDSLOTS", 0)
    assert down.type.__name__ in {"ClusterDownError", "MasterDownError"}
