"""The bench of Redis: a server that is up answers, one that was harmed shows it; groups fail over and heal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from child_processes import state
from fault_proxy import FaultProxy
from hiredis import ReplyError
from patience import wait_until
from redis_replicas import Replicated
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


async def test_clients_of_a_cluster_can_be_sent_through_proxies(redis_cluster, redis_binary):
    if version_of(redis_binary) < (7,):
        pytest.skip("older nodes do not change their own address")
    async with FaultProxy(redis_cluster.nodes[0].port) as a, FaultProxy(redis_cluster.nodes[1].port) as b:
        async with FaultProxy(redis_cluster.nodes[2].port) as c:
            await redis_cluster.announce([a, b, c])
            slots = redis_cluster.nodes[0].ask("CLUSTER", "SLOTS")
            assert {master[1] for _, _, master, *_ in slots} == {a.port, b.port, c.port}
            await redis_cluster.announce(None)
