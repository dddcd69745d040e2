"""From a URL or a client to the servers: what is understood, what is refused, and that no secret is repeated."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.cluster import LoadBalancingStrategy
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis_links import servers

from fencing_sdk.backends.redis.connection.dial import SentinelDialer, SentinelService, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.router import SlotMap
from fencing_sdk.backends.redis.options import (
    DRIVER_OPTIONS,
    servers_of_client,
)
from fencing_sdk.errors import ConfigurationError

SECRET = "hunter2"


def server(url: str, **options: object) -> ServerSettings:
    place = servers(url, **options)
    assert isinstance(place, ServerDialer)
    return place.server


def service(url: str) -> tuple[ServerSettings, SentinelService]:
    place = servers(url)
    assert isinstance(place, SentinelDialer)
    return place.server, place.service


def cluster(url: str) -> SlotMap:
    place = servers(url)
    assert isinstance(place, SlotMap)
    return place


@pytest.mark.parametrize(
    ("url", "kind", "address", "arguments"),
    [
        ("redis://", Connection, "localhost:6379", {}),
        ("redis://h", Connection, "h:6379", {}),
        ("redis://h:1/", Connection, "h:1", {}),
        ("redis://h/7", Connection, "h:6379", {"db": 7}),
        ("redis://h?db=7", Connection, "h:6379", {"db": 7}),
        ("redis://h:1/7?", Connection, "h:1", {"db": 7}),
        ("redis://[::1]", Connection, "[::1]:6379", {}),
        ("redis://[fe80::1]:7000/1", Connection, "[fe80::1]:7000", {"db": 1}),
        ("redis://:pw@h", Connection, "h:6379", {"username": "default", "password": "pw"}),
        ("redis://app:pw@h", Connection, "h:6379", {"username": "app", "password": "pw"}),
        ("redis://a%3Ab:p%40%2F%3F%23%25w@h", Connection, "h:6379", {"username": "a:b", "password": "p@/?#%w"}),
        ("redis://app:p:w@h", Connection, "h:6379", {"username": "app", "password": "p:w"}),
        ("redis://h?password=pw", Connection, "h:6379", {"username": "default", "password": "pw"}),
        ("redis://h?username=app&password=p%2Bw", Connection, "h:6379", {"username": "app", "password": "p+w"}),
        ("rediss://h:6380", SSLConnection, "h:6380", {}),
        ("valkey://h", Connection, "h:6379", {}),
        ("valkeys://h", SSLConnection, "h:6379", {}),
        ("unix:///run/redis.sock", UnixDomainSocketConnection, "/run/redis.sock", {}),
        ("unix:///run/a%20b?db=1", UnixDomainSocketConnection, "/run/a b", {"db": 1}),
        ("redis+unix://app:pw@/s", UnixDomainSocketConnection, "/s", {"username": "app", "password": "pw"}),
    ],
)
def test_one_server(url, kind, address, arguments):
    found = server(url)
    assert (found.kind, found.address) == (kind, address)
    assert {
        name: found.arguments[name] for name in found.arguments if name not in {"host", "port", "path"}
    } == arguments
    found.connection()  # redis-py takes all of it


def test_options_of_the_driver_are_read_by_their_kind():
    found = server(
        "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs=/ca.pem"
        "&socket_connect_timeout=0.5&client_name=me"
    ).arguments
    assert found == {
        "host": "h",
        "port": 6379,
        "ssl_cert_reqs": "none",
        "ssl_check_hostname": False,
        "ssl_ca_certs": "/ca.pem",
        "socket_connect_timeout": 0.5,
        "client_name": "me",
    }


def test_every_option_of_the_driver_is_one_that_redis_py_knows():
    text = {name: "x" for name in DRIVER_OPTIONS if name.startswith("ssl_")}
    chosen = text | {"ssl_cert_reqs": "none", "ssl_check_hostname": "no"}
    rest = {"username": "u", "password": "p", "db": 1, "client_name": "c"}
    seconds = {"socket_timeout": 1, "socket_connect_timeout": 1}
    assert {*chosen, *rest, *seconds, "sentinel_username", "sentinel_password"} == {*DRIVER_OPTIONS}
    server("rediss://h", **chosen, **rest, **seconds).connection()


def test_a_connection_tries_once_and_not_for_ever():
    made = server("redis://h").connection()
    assert made.socket_connect_timeout == 4.0
    assert made.retry.get_retries() == 0
    for options in ("socket_connect_timeout=0.5", "socket_timeout=0.5", "socket_timeout=9&socket_connect_timeout=0.5"):
        assert server(f"redis://h?{options}").connection().socket_connect_timeout == 0.5


# Sentinels and clusters


def test_sentinels_and_the_servers_behind_them_have_logins_of_their_own():
    behind, found = service(
        "redis+sentinel://app:pw@s1,s2:1,[::1]:2/my%20service/3"
        "?sentinel_username=watch&sentinel_password=dog&socket_connect_timeout=2"
    )
    assert found.name == "my service"
    assert [sentinel.address for sentinel in found.sentinels] == ["s1:26379", "s2:1", "[::1]:2"]
    assert {name: behind.arguments[name] for name in ("username", "password", "db")} == {
        "username": "app",
        "password": "pw",
        "db": 3,
    }
    assert found.sentinels[0].arguments == {
        "host": "s1",
        "port": 26379,
        "username": "watch",
        "password": "dog",
        "socket_connect_timeout": 2.0,
    }
    assert {behind.kind, *(sentinel.kind for sentinel in found.sentinels)} == {Connection}
    for made in (behind, *found.sentinels):
        made.connection()


def test_a_cluster_is_known_by_its_seeds():
    found = cluster("rediss+cluster://app:pw@h1,h2:7001,[::1]:7002?ssl_cert_reqs=none")
    assert found._seeds == (("h1", 6379), ("h2", 7001), ("::1", 7002))
    node = found.dialer("h9:7009")
    assert isinstance(node, ServerDialer)
    assert (node.server.kind, node.server.address) == (SSLConnection, "h9:7009")
    assert {name: node.server.arguments[name] for name in ("username", "password", "ssl_cert_reqs")} == {
        "username": "app",
        "password": "pw",
        "ssl_cert_reqs": "none",
    }


# What is refused


@pytest.mark.parametrize(
    ("url", "word"),
    [
        (f"http://{SECRET}", "redis://"),
        (SECRET, "redis://"),
        (f"redis://h/{SECRET}", "database"),
        ("redis://h/1/2", "database"),
        ("redis://h/-1", "database"),
        ("redis://h/1?db=1", "twice"),
        ("redis://h?db=-1", "db"),
        ("redis://h?db=99999999999999999999", "db"),
        (f"redis://h?db={SECRET}", "db"),
        (f"redis://app:{SECRET}#x@h", "%23"),
        (f"redis://app:{SECRET}/x@h", "%2F"),
        (f"redis://:p@{SECRET}@h", "%40"),
        (f"redis://h:{SECRET}", "port"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h:", "port"),
        ("redis://:1", "host"),
        ("redis://::1", "brackets"),
        (f"redis://[{SECRET}", "port|brackets"),
        (f"redis://{SECRET}@h", "password"),
        (f"redis://app:{SECRET}@h?password={SECRET}", "twice"),
        ("redis://h1,h2", "redis\\+sentinel"),
        (f"redis://app:%FF{SECRET}@h", "UTF-8"),
        (f"redis://h%00{SECRET}", "control"),
        (f"unix://{SECRET}", "unix:///"),
        (f"unix://h/{SECRET}", "unix:///"),
        ("unix:///", "unix:///"),
        ("redis+sentinel://h", "service"),
        (f"redis+sentinel:///{SECRET}", "service"),
        (f"redis+sentinel://h/service/{SECRET}", "database"),
        ("redis+sentinel://h1,,h2/service", "host"),
        ("redis+cluster://", "redis\\+cluster"),
        ("redis+cluster://h/1", "database"),
        (f"redis+cluster://h/{SECRET}", "database"),
        ("redis+cluster://h?db=1", "database"),
        ("redis://h?ssl_cert_reqs=none", "rediss"),
        ("redis://h?sentinel_password=x", "sentinel_password"),
        (f"rediss://h?ssl_cert_reqs={SECRET}", "required, optional, none"),
        (f"rediss://h?ssl_check_hostname={SECRET}", "ssl_check_hostname"),
        ("rediss://h?ssl_check_hostname=", "ssl_check_hostname"),
        ("rediss://h?ssl_ca_certs=", "ssl_ca_certs"),
        ("redis://h?socket_timeout=0", "socket_timeout"),
        ("redis://h?socket_timeout=nan", "socket_timeout"),
        ("redis://h?socket_timeout=inf", "socket_timeout"),
        (f"redis://h?socket_connect_timeout={SECRET}", "socket_connect_timeout"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(url, word):
    with pytest.raises(ConfigurationError, match=f"(?i){word}") as refused:
        servers(url)
    error: BaseException | None = refused.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


def test_settings_show_nothing_of_what_they_know():
    for url in (
        f"redis://app:{SECRET}@h",
        f"redis+sentinel://app:{SECRET}@h/{SECRET}?sentinel_password={SECRET}",
        f"redis+cluster://:{SECRET}@h",
    ):
        settings = servers(url)
        assert SECRET not in f"{settings!r} {vars(settings)!r}"


# Clients


def test_a_client_of_a_sentinel_asks_all_its_sentinels():
    sentinel = redis.asyncio.sentinel.Sentinel(
        [("s1", 1), ("s2", 2)],
        min_other_sentinels=1,
        sentinel_kwargs={"password": "dog"},
        force_master_ip="10.0.0.1",
        password="pw",
    )
    place = servers_of_client(sentinel.master_for("service", db=1))
    assert isinstance(place, SentinelDialer)
    found = place.service
    assert (found.name, found.peers, found.host) == ("service", 1, "10.0.0.1")
    assert [one.address for one in found.sentinels] == ["s1:1", "s2:2"]
    assert found.sentinels[0].arguments["password"] == "dog"
    assert (place.server.kind, place.server.arguments["password"], place.server.arguments["db"]) == (
        Connection,
        "pw",
        1,
    )
    place.server.at("h", 1).connection()


def clusters() -> list[Any]:
    found: list[Any] = [
        redis.asyncio.RedisCluster(
            host="h", port=7000, password="pw", ssl=True, address_remap=lambda _: ("remapped", 1)
        ),
        redis.asyncio.RedisCluster.from_url(
            "rediss://:pw@h:7000",
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN,
            address_remap=lambda _: ("remapped", 1),
        ),
    ]
    valkey = pytest.importorskip("valkey.asyncio")
    found.append(
        valkey.ValkeyCluster(host="h", port=7000, password="pw", ssl=True, address_remap=lambda _: ("remapped", 1))
    )
    return found


@pytest.mark.parametrize("number", range(3))
def test_a_client_of_a_cluster_shares_its_login_with_all_nodes(number):
    client = clusters()[number]
    before = dict(client.nodes_manager.connection_kwargs)
    place = servers_of_client(client)
    assert isinstance(place, SlotMap)
    assert client.nodes_manager.connection_kwargs == before
    assert place._seeds == (("h", 7000),)
    node = place.dialer("h2:7002")
    assert isinstance(node, ServerDialer)
    assert (node.server.kind, node.server.address) == (SSLConnection, "remapped:1")
    assert node.server.arguments["password"] == "pw"
    assert node.server.arguments.get("redis_connect_func") is None
    node.server.connection()


def pipelines_and_the_like() -> list[object]:
    client = redis.asyncio.Redis()
    return [
        "redis://localhost",
        None,
        redis.Redis().pipeline(),
        redis.RedisCluster,
        redis.asyncio.Redis,
        client.pipeline(),
        client.pubsub(),
        client.connection_pool,
        redis.asyncio.RedisCluster(host="h").pipeline(),
        redis.asyncio.sentinel.Sentinel([("s1", 1)]),
        redis.asyncio.sentinel.Sentinel([("s1", 1)]).slave_for("service"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_store_refuses_what_is_no_client(number):
    with pytest.raises(ConfigurationError, match=r"^client ") as refused:
        servers_of_client(pipelines_and_the_like()[number])
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args


def test_resends_decoding_and_health_checks_of_a_client_are_not_copied():
    resent = [redis.exceptions.BusyLoadingError]
    client = redis.asyncio.Redis(
        retry=Retry(NoBackoff(), 5),
        retry_on_error=resent,
        health_check_interval=9,
        decode_responses=True,
        protocol=3,
        socket_timeout=7,
        socket_connect_timeout=6,
    )
    client.connection_pool.connection_kwargs["retry_on_timeout"] = True
    place = servers_of_client(client)
    assert isinstance(place, ServerDialer)
    made = place.server.connection()
    assert (made.retry.get_retries(), made.retry_on_error, made.health_check_interval) == (0, [], 0)
    assert not made.encoder.decode_responses
    assert not getattr(made, "maint_notifications_config", None)  # on by default where redis-py has it
    assert made.socket_connect_timeout == 6
    assert resent == [redis.exceptions.BusyLoadingError]


@pytest.mark.parametrize("maker", [redis.sentinel, redis.asyncio.sentinel], ids=["threads", "tasks"])
def test_a_client_of_either_world_is_read(maker):
    package = redis if maker is redis.sentinel else redis.asyncio
    client = package.Redis(
        host="h", port=1, db=2, password="pw", ssl=True, ssl_ca_certs="/ca.pem", socket_connect_timeout=3
    )
    place = servers_of_client(client)
    assert isinstance(place, ServerDialer)
    assert (place.server.kind, place.server.address) == (SSLConnection, "h:1")
    made = place.server.connection()
    assert (made.db, made.password, made.socket_connect_timeout) == (2, "pw", 3)
    service = maker.Sentinel([("s1", 1)], sentinel_kwargs={"password": "dog"}).master_for("service", password="pw")
    found = servers_of_client(service)
    assert isinstance(found, SentinelDialer)
    assert [one.address for one in found.service.sentinels] == ["s1:1"]
    assert found.service.sentinels[0].arguments["password"] == "dog"
    found.server.at("h", 1).connection()


@pytest.mark.parametrize("lost", [{"ssl": True, "ssl_validate_ocsp": True}, {"redis_connect_func": print}], ids=str)
def test_what_a_client_for_threads_alone_does_is_not_left_out_in_silence(lost):
    client = redis.Redis()
    client.connection_pool.connection_kwargs |= lost
    if "ssl" in lost:
        client.connection_pool.connection_class = redis.SSLConnection
    with pytest.raises(ConfigurationError, match=f"^client has {list(lost)[-1]}, .* pass a client of redis.asyncio"):
        servers_of_client(client)


# Slots


@pytest.mark.parametrize("name", ["a%20b", "a%0Ab", "caf%C3%A9", "%7F"])
def test_a_client_name_that_every_server_refuses_is_refused_at_once(name):
    with pytest.raises(ConfigurationError, match="client_name must have no spaces"):
        servers(f"redis://localhost?client_name={name}")
