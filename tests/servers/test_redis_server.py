"""The bench of Redis: a server that is up answers, one that was harmed shows it; groups fail over and heal."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from child_processes import state
from fault_proxy import FaultProxy
from hiredis import ReplyError
from patience import until, wait_until
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel
from redis_cluster import Cluster
from redis_replicas import Replicated, info
from redis_server import version_of

pytest_plugins = ["redis_fixtures"]


# The bench itself: a server that is up answers, and one that was harmed shows it.


def client(url: str, **options) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, **options)


async def test_the_shared_server_answers_and_is_empty(redis_server):
    assert await redis_server.command("DBSIZE") == 0
    with client(redis_server.url) as driver:
        driver.set("left", "behind")
    assert await redis_server.command("GET", "left") == "behind"


test_what_a_test_leaves_behind_is_gone = test_the_shared_server_answers_and_is_empty


def test_a_server_listens_on_its_unix_socket(redis_server):
    with client(f"unix://{redis_server.socket_path}") as driver:
        assert driver.ping()


def test_an_error_reply_is_raised(redis_server):
    with pytest.raises(ReplyError, match="ERR"):
        redis_server.ask("NO-SUCH-COMMAND")


def test_settings_reach_redis(start_redis):
    server = start_redis(maxmemory="2mb", maxmemory_policy="volatile-lru", notify_keyspace_events="", appendonly=True)
    assert server.ask("CONFIG", "GET", "maxmemory-policy") == ["maxmemory-policy", "volatile-lru"]
    assert server.ask("CONFIG", "GET", "maxmemory") == ["maxmemory", str(2 * 1024 * 1024)]
    assert server.ask("CONFIG", "GET", "appendonly") == ["appendonly", "yes"]


def test_passwords_and_users_are_asked_for_and_the_bench_needs_none(start_redis):
    server = start_redis(requirepass="secret", user=["app on >other ~fencing* &* +@all -@admin"])
    with client(server.url) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    with client(server.url, password="secret") as default, client(server.url, username="app", password="other") as app:
        assert default.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            app.set("elsewhere", 1)
    assert server.ask("ACL", "WHOAMI") == "bench"


def test_redis_speaks_tls_with_a_certificate_of_the_authority(start_redis, certificates):
    server = start_redis(tls=certificates)
    with client(server.tls_url, ssl_ca_certs=str(certificates.authority)) as trusting:
        assert trusting.ping()
    with client(server.tls_url) as stranger, pytest.raises(redis.ConnectionError) as refused:
        stranger.ping()
    assert isinstance(refused.value.__context__, ssl.SSLCertVerificationError)


def test_a_server_asks_for_the_clients_certificate(start_redis, certificates):
    server = start_redis(tls=certificates, tls_auth_clients=True)
    trust = {"ssl_ca_certs": str(certificates.authority)}
    pair = {"ssl_certfile": str(certificates.client_certificate), "ssl_keyfile": str(certificates.client_key)}
    with client(server.tls_url, **trust, **pair) as known:
        assert known.ping()
    with client(server.tls_url, **trust) as unknown, pytest.raises(redis.ConnectionError):
        unknown.ping()


def test_a_restart_keeps_the_port_and_what_was_appended(start_redis):
    server = start_redis(appendonly=True, appendfsync="always")
    port, pid = server.port, server.pid
    server.ask("SET", "kept", "1")
    server.restart()
    assert (server.port, server.ask("GET", "kept")) == (port, "1")
    server.kill()
    server.start()
    assert (server.port, server.ask("GET", "kept")) == (port, "1")
    assert server.pid != pid


def test_a_crash_without_append_only_file_loses_everything(start_redis):
    server = start_redis()
    server.ask("SET", "gone", "1")
    server.kill()
    with client(server.url) as driver, pytest.raises(redis.ConnectionError):
        driver.ping()
    server.start()
    assert server.ask("EXISTS", "gone") == 0


def test_a_paused_redis_takes_connections_and_does_not_answer(start_redis):
    server = start_redis()
    server.pause()
    with client(server.url, socket_timeout=0.2) as driver, pytest.raises(redis.TimeoutError):
        driver.ping()
    server.resume()
    assert server.ask("PING") == "PONG"


def test_two_servers_of_redis_never_share_a_port(start_redis):
    first, second = start_redis(), start_redis()
    assert first.port != second.port
    second.kill()
    second.another_port()
    second.configure()
    conf = second.folder / "conf"
    conf.write_text(conf.read_text().replace(f"port {second.port}", f"port {first.port}"))
    second.start()
    assert second.port != first.port
    assert second.ask("PING") == "PONG"


DYING = """
import os, shutil, signal, sys
{before}
sys.path.insert(0, {folder!r})
from redis_server import RedisServer
server = RedisServer(binary={binary!r}).start()
print(server.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("before", "end"),
    [
        ("shutil.which = lambda name: None", "sys.exit()"),
        ("shutil.which = lambda name: None", "raise KeyboardInterrupt"),
        ("", "os.kill(os.getpid(), signal.SIGKILL)"),
    ],
    ids=["exit", "interrupt", "kill"],
)
def test_no_redis_outlives_the_tests(redis_binary, before, end, tmp_path):
    """A SIGKILL is seen by the kernel alone, which is asked for this through setpriv; the others do without."""
    script = DYING.format(folder=str(Path(__file__).parent), binary=redis_binary, before=before, end=end)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    wait_until(lambda: state(int(done.stdout)) in {"", "Z"}, what="the server is dead")


# The bench itself: groups of servers that fail over, and slots that move.


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
