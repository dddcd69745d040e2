"""RedisGuard on a cluster, behind Sentinel, and after a failover that lost writes."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fault_proxy import FaultProxy
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import until
from redis.asyncio import Redis, RedisCluster
from redis.cluster import LoadBalancingStrategy
from redis_cluster import Cluster
from valkey.asyncio import ValkeyCluster

from fencing_sdk import ConfigurationError, StaleTokenError, Token
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.redis._scripts import fence_key, slot
from fencing_sdk.testing.promises.fences import ODD_RESOURCES
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["redis_fixtures"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


def cluster_url(cluster):
    return cluster.url.replace("redis://", "redis+cluster://")


def stored(cluster, key):
    return cluster.node_of(key).ask("GET", key)


def moved(node):
    """How often *node* sent a client elsewhere."""
    found = re.search(r"errorstat_MOVED:count=(\d+)", node.ask("INFO", "errorstats"))
    return int(found[1]) if found else 0


class ClusterSuite(GuardSuite):
    @pytest.fixture
    async def guard(self, redis_cluster):
        self.cluster = redis_cluster
        async with self.opened() as guard:
            yield guard

    @asynccontextmanager
    async def opened(self):
        async with RedisGuard(cluster_url(self.cluster)) as guard:
            yield guard

    async def write(self, guard, resource, token, value):
        await guard.execute(resource, token, ("SET", guard.key(resource, "value"), value))

    async def read(self, guard, resource):
        return stored(self.cluster, guard.key(resource, "value"))

    def reopen(self, guard):
        return self.opened()


class TestCommandsOnACluster(ClusterSuite): ...


class TestSetThroughValkeysClusterClient(ClusterSuite):
    @asynccontextmanager
    async def opened(self):
        client = ValkeyCluster.from_url(self.cluster.url)
        yield RedisGuard(client)
        await client.aclose()

    async def write(self, guard, resource, token, value):
        await guard.set(resource, token, guard.key(resource, "value"), value)


@pytest.fixture
async def guard(redis_cluster):
    async with RedisGuard(cluster_url(redis_cluster)) as guard:
        yield guard


# Slots.

names = st.sampled_from(ODD_RESOURCES) | st.text(
    st.sampled_from("ab{}%:/\N{LOCK}") | st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=40
)


def test_a_resources_keys_and_its_fence_share_a_slot(redis_cluster):
    guard = RedisGuard(Redis())

    @given(names, names)
    @settings(max_examples=100, deadline=None)
    def shared(resource, name):
        key, fence = guard.key(resource, name), fence_key("fence", resource)
        node = redis_cluster.nodes[0]
        assert node.ask("CLUSTER", "KEYSLOT", key) == node.ask("CLUSTER", "KEYSLOT", fence) == slot(fence)

    shared()


@pytest.mark.parametrize("key", [b"", b"{", b"}", b"{}", b"{}a", b"a{b}c{d}", b"a{b", b"}{a}", b"{{a}}", b"\xff{\0}"])
def test_slots_are_counted_as_the_server_does(redis_cluster, key):
    assert slot(key) == redis_cluster.nodes[0].ask("CLUSTER", "KEYSLOT", key)


@pytest.mark.parametrize(
    "commands",
    [
        [("SET", "seats/7", 1)],
        [("SET", "{seats/42}:a", 1), ("HSET", b"seats/7", "f", 1)],
        [("DEL", "{seats/42}:a", "seats/7")],
        [("MSET", "{seats/42}:a", 1, "seats/7", 2)],
        [("RENAME", "{seats/42}:a", "seats/7")],
    ],
)
async def test_a_key_in_another_slot_is_refused_before_anything_is_sent(guard, redis_cluster, commands):
    with pytest.raises(ConfigurationError, match=r"'seats/7' is in another slot.*'seats/42'.*guard\.key\("):
        await guard.execute("seats/42", NEW, *commands)
    with pytest.raises(ConfigurationError, match="another slot"):
        await guard.execute("seats/42", NEW, ("PING",), keys=["seats/7"])
    with pytest.raises(ConfigurationError, match="another slot"):
        await guard.script("return 1").run("seats/42", NEW, keys=["seats/7"])
    assert [node.ask("DBSIZE") for node in redis_cluster.nodes] == [0, 0, 0]


# Slots that move.


async def test_fence_and_data_move_together_and_no_write_is_lost_or_doubled(guard, redis_cluster):
    """Counted, so a write that both nodes executed would show."""
    key, written = guard.key("a", "n"), 0
    home = redis_cluster.node_of(key)
    moving, away = redis_cluster.slot_of(key), redis_cluster.other_than(home)

    async def write(times):
        nonlocal written
        for _ in range(times):
            await guard.execute("a", NEW, ("INCR", key))
            written += 1
            with pytest.raises(StaleTokenError):
                await guard.execute("a", OLD, ("INCR", key))

    await write(3)
    for source, target in ((home, away), (away, home)):
        redis_cluster.start_move(moving, to=target)
        await write(3)
        redis_cluster.move_keys(moving, to=target)
        await write(3)
        redis_cluster.finish_move(moving, to=target)
        await write(3)
        assert source.ask("DBSIZE") == 0
        assert redis_cluster.node_of(key) is target
    assert stored(redis_cluster, key) == str(written)
    assert await guard.highest("a") == NEW


async def test_many_first_calls_at_once_go_where_they_belong(redis_cluster):
    """A client of redis-py that does not know the nodes yet would send each to any of them."""
    before = [moved(node) for node in redis_cluster.nodes]
    for _ in range(5):
        async with RedisGuard(cluster_url(redis_cluster)) as guard:
            await asyncio.gather(*(guard.highest(f"resource {number}") for number in range(20)))
        async with RedisGuard(cluster_url(redis_cluster)) as guard:
            await asyncio.gather(*(guard.raise_to(f"resource {number}", NEW) for number in range(20)))
    assert [moved(node) for node in redis_cluster.nodes] == before


async def test_a_node_without_the_script_gets_it(guard, redis_cluster):
    for name in ("a", "b", "c", "d", "e", "f"):
        await guard.set(name, NEW, guard.key(name, "x"), 1)
    for node in redis_cluster.nodes:
        node.ask("SCRIPT", "FLUSH")
    for name in ("a", "b", "c", "d", "e", "f"):
        await guard.set(name, NEW, guard.key(name, "x"), 2)
        await guard.raise_to(name, NEW)
        assert stored(redis_cluster, guard.key(name, "x")) == "2"


@pytest.mark.parametrize("driver", [RedisCluster, ValkeyCluster])
async def test_a_write_on_a_cluster_whose_answer_is_lost_happened_once(redis_cluster, driver):
    """Although a cluster's client repeats by itself what it may."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.port)) for node in redis_cluster.nodes]
        await redis_cluster.announce(proxies)
        stack.push_async_callback(redis_cluster.announce, None)
        client = driver.from_url(proxies[0].url)
        stack.push_async_callback(client.aclose)
        guard = RedisGuard(client)
        key = guard.key("a", "n")
        await guard.execute("a", OLD, ("INCR", key))
        (proxy,) = [proxy for proxy in proxies if proxy.server_port == redis_cluster.node_of(key).port]
        lost = proxy.lose_replies(of=key)
        with pytest.raises(Exception, match=r"(?i)closed|reading|lost") as error:
            await guard.execute("a", NEW, ("INCR", key))
        assert type(error.value).__name__ == "ConnectionError"
        await asyncio.wait_for(lost, 20)
        assert stored(redis_cluster, key) == "2"
        assert await guard.execute("a", NEW, ("INCR", key)) == [3]

        lost = proxy.lose_replies(of=fence_key("fence", "a"))
        await guard.raise_to("a", Token(35))
        assert lost.done()
        assert await guard.highest("a") == 35


@pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction':DeprecationWarning")  # redis-py on Python 3.14
async def test_a_fence_is_never_read_from_a_replica(redis_binary):
    """It may lag. A client can be set to send a GET there."""
    with Cluster(masters=1, replicas=1, binary=redis_binary) as cluster:
        strategy = LoadBalancingStrategy.RANDOM_REPLICA
        _, replica = cluster.nodes
        await until(lambda: len(replica.ask("CLUSTER", "SLOTS")[0]) == 4, what="the replica names itself")
        async with RedisCluster.from_url(replica.url, load_balancing_strategy=strategy) as client:
            guard = RedisGuard(client)
            await guard.raise_to("a", NEW)
            assert await guard.highest("a") == NEW
            assert "cmdstat_get:" not in replica.ask("INFO", "commandstats")
            await client.get("fence:{a}")
            assert "cmdstat_get:" in replica.ask("INFO", "commandstats"), "it is not such a client"


# Sentinel, and what a failover takes.


# Several resources on a cluster.

ACCOUNTS = ("accounts/1", "accounts/2", "accounts/3", "accounts/4")


async def test_several_resources_are_admitted_one_slot_after_the_other(redis_cluster):
    async with RedisGuard(cluster_url(redis_cluster)) as guard:
        await guard.admit_all(dict.fromkeys(ACCOUNTS, 33))
        assert [await guard.highest(name) for name in ACCOUNTS] == [33] * 4
        await guard.raise_to("accounts/3", 99)
        with pytest.raises(StaleTokenError) as refusal:
            await guard.admit_all(dict.fromkeys(ACCOUNTS, 34))
        assert (refusal.value.resource, refusal.value.fence) == ("accounts/3", 99)
        assert await guard.highest("accounts/3") == 99


async def test_commands_for_several_resources_need_one_slot(redis_cluster):
    async with RedisGuard(cluster_url(redis_cluster)) as guard:
        with pytest.raises(ConfigurationError, match="different slots of the cluster"):
            await guard.execute_all(dict.fromkeys(ACCOUNTS, 33), ("SET", guard.key("accounts/1", "value"), "x"))
        assert [await guard.highest(name) for name in ACCOUNTS] == [None] * 4
        assert await guard.execute_all({"accounts/1": 33}, ("SET", guard.key("accounts/1", "value"), "x"))
