"""The bench itself: a server that is up answers, and one that was harmed shows it."""

import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from hiredis import ReplyError

pytest_plugins = ["redis_fixtures"]


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


def test_settings_reach_the_server(start_redis):
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


def test_a_server_speaks_tls_with_a_certificate_of_the_authority(start_redis, certificates):
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


def test_a_paused_server_takes_connections_and_does_not_answer(start_redis):
    server = start_redis()
    server.pause()
    with client(server.url, socket_timeout=0.2) as driver, pytest.raises(redis.TimeoutError):
        driver.ping()
    server.resume()
    assert server.ask("PING") == "PONG"


def test_two_servers_never_share_a_port(start_redis):
    first, second = start_redis(), start_redis()
    assert first.port != second.port
    second.kill()
    second._another_port()
    second._configure()
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
def test_no_server_outlives_the_tests(redis_binary, before, end, tmp_path):
    """A SIGKILL is seen by the kernel alone, which is asked for this through setpriv; the others do without."""
    script = DYING.format(folder=str(Path(__file__).parent), binary=redis_binary, before=before, end=end)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    limit = time.monotonic() + 20
    while _alive(int(done.stdout)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not _alive(int(done.stdout))


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
