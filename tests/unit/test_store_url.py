"""Where the servers of a URL are: one reading for all stores, the guards and the command line, on every Python."""

import inspect

import pytest
from refused_urls import refuse_every_url

from fencing_sdk._values.postgresql_url import read_postgresql_url
from fencing_sdk._values.store_url import HostAddress, joined, split_url
from fencing_sdk.backends import BUILTIN, from_url
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard

SECRET = "tr0ub4dor"

PATHS = {"redis+sentinel": "/service", "rediss+sentinel": "/service", "zk": "/shop", "zookeeper": "/shop"}
LISTS = sorted({*BUILTIN} - {"memory", "sqlite", "unix", "redis+unix", "redis", "rediss", "valkey", "valkeys"})
"""The schemes that take a list of hosts."""
WITHOUT_LOGIN = {"kahuna", "kahuna+https"}


def url_of(scheme: str, hosts: str) -> str:
    return f"{scheme}://{hosts}{PATHS.get(scheme, '')}"


def everything_said(error: BaseException | None) -> str:
    said = ""
    while error is not None:
        said, error = f"{said} {error!r}", error.__cause__ or error.__context__
    return said


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("h", [("h", None)]),
        ("H.example:1,h2:65535", [("h.example", 1), ("h2", 65535)]),
        ("h1,[::1]:2,[FE80::1]", [("h1", None), ("::1", 2), ("fe80::1", None)]),
        ("[::ffff:127.0.0.1]:3", [("::ffff:127.0.0.1", 3)]),
        ("[fe80::1%25eth0]:4,[fe80::2%en0]", [("fe80::1%eth0", 4), ("fe80::2%en0", None)]),
        ("a%2Db,127.0.0.1:5,b%C3%BCcher.example", [("a-b", None), ("127.0.0.1", 5), ("b\u00fccher.example", None)]),
        ("u:p@h1:1,h2", [("h1", 1), ("h2", None)]),
        ("u%40x:p%40%2F%3A%2C@[::1],h2", [("::1", None), ("h2", None)]),
        (":p,w@h", [("h", None)]),
    ],
)
def test_hosts_are_read_with_their_ports(hosts: str, addresses: list[HostAddress]):
    parts = split_url(f"x://{hosts}/path?a=b")
    assert list(parts.addresses()) == addresses
    assert (parts.scheme, parts.path, parts.query) == ("x", "/path", "a=b")


def test_user_and_password_are_decoded_and_in_no_repr():
    parts = split_url("x://u%40x:p%40%2F%3A%2C:%C3%BC@h")
    assert (parts.user, parts.password) == ("u@x", "p@/:,:\u00fc")
    assert "p@/" not in repr(parts)
    for url, login in (
        ("x://h", (None, None)),
        ("x://@h", ("", None)),
        ("x://u@h", ("u", None)),
        ("x://:@h", ("", "")),
    ):
        assert (split_url(url).user, split_url(url).password) == login


@pytest.mark.parametrize("scheme", LISTS)
@pytest.mark.parametrize(
    "hosts", ["h1,[::1]:2,h3", "[::1]:1,[::2]:2,[::3]:3", "h1:1,h2:2,[fe80::1%25eth0]:3", "127.0.0.1,h2,b%2Dc"]
)
def test_a_list_with_ipv6_is_read_where_urlsplit_refuses_everything(scheme: str, hosts: str, monkeypatch):
    refuse_every_url(monkeypatch)
    assert from_url(url_of(scheme, hosts))
    if scheme not in WITHOUT_LOGIN:
        assert from_url(url_of(scheme, f"user:p%40ss@{hosts}"))


@pytest.mark.parametrize("scheme", sorted({*BUILTIN} - {*LISTS}))
def test_other_urls_are_read_there_too(scheme: str, monkeypatch, tmp_path):
    refuse_every_url(monkeypatch)
    place = {"memory": "", "sqlite": f"{tmp_path}/a.db", "unix": "/run/s", "redis+unix": "/run/s"}.get(
        scheme, "[::1]:1"
    )
    assert from_url(f"{scheme}://{place}")


@pytest.mark.parametrize(
    ("guard", "url"),
    [
        (EtcdGuard, "etcd://u:p@h1,[::1]:2"),
        (KahunaGuard, "kahuna://h1,[::1]:2"),
        (SqlGuard, "postgresql://u:p@h1,[::1]:2/app"),
        (SqlGuard, "sqlite:///app.db"),
        (RedisGuard, "redis://u:p@[::1]:2/1?socket_timeout=2"),
        (RedisGuard, "rediss+cluster://u:p@h1,[::1]:2"),
        (RedisGuard, "unix:///run/s?db=1"),
    ],
)
async def test_guards_read_their_urls_there_too(guard, url: str, monkeypatch):
    refuse_every_url(monkeypatch)
    made = guard(url)
    if inspect.iscoroutinefunction(getattr(made, "aclose", None)):
        await made.aclose()


def test_the_driver_of_postgresql_is_given_parts():
    url = read_postgresql_url("postgresql://u%40x:p%2Fw@h1:1,[::1]:2,h3/shop%2F1?sslmode=require&options=-c%20a%3Db")
    assert url.arguments() == {
        "user": "u@x",
        "password": "p/w",
        "database": "shop/1",
        "host": ["h1", "::1", "h3"],
        "port": [1, 2, 5432],
    }
    assert url.options_dsn == "postgresql://?sslmode=require&options=-c%20a%3Db"
    assert [(one.place, one.arguments()["host"]) for one in url.each_host()] == [
        ("h1:1", ["h1"]),
        ("[::1]:2", ["::1"]),
        ("h3:5432", ["h3"]),
    ]
    assert read_postgresql_url("postgresql://").arguments() == {}


@pytest.mark.parametrize("scheme", LISTS)
@pytest.mark.parametrize(
    ("hosts", "part"),
    [
        ("h1,,h3", "host 2 of url is empty"),
        ("h1,h2,", "host 3 of url is empty"),
        ("h1,:1,h3", "host 2 of url is empty"),
        ("h1, h2,h3", "host 2 of url has a space"),
        ("h1,h2 ,h3", "host 2 of url has a space"),
        ("h1,h%202,h3", "host 2 of url has a space"),
        ("h1,h2:0,h3", "host 2 of url has a port that is no number from 1 to 65535"),
        ("h1,h2:65536,h3", "host 2 of url has a port"),
        ("h1,h2:,h3", "host 2 of url has a port"),
        (f"h1,h2:{SECRET},h3", "host 2 of url has a port"),
        ("h1,h2:\u0661,h3", "host 2 of url has a port"),
        ("h1,::1,h3", "host 2 of url has an IPv6 address without brackets"),
        ("h1,[::1,h3", "host 2 of url has brackets around what is no IPv6 address"),
        ("h1,[::1]x:1,h3", "host 2 of url has brackets"),
        (f"h1,[{SECRET}],h3", "host 2 of url has brackets"),
        ("h1,[127.0.0.1],h3", "host 2 of url has brackets"),
        ("h1,[::1%25],h3", "host 2 of url has brackets"),
        (f"h1,h2]{SECRET},h3", "host 2 of url has a character that is part of no host"),
        ("h1,h%2C2,h3", "host 2 of url has a character that is part of no host"),
        ("h1,h%FF,h3", "host 2 of url has bytes that are not UTF-8"),
        ("h1,h%00,h3", "host 2 of url has a space or a control character"),
        (f"u:{SECRET}@x@h1,h2,h3", "url has two '@'"),
        (f"u:{SECRET}@h1,u:{SECRET}@h2,h3", "url has two '@'"),
        (f"h1:1,u:{SECRET}@h2,h3", "url has a host before the user"),
        (f"u:1/{SECRET}@h1,h2,h3", "url has a '/' before an '@'; in user and password write %2F"),
        (f"u:{SECRET}%FF@h1,h2,h3", "url has bytes in its password that are not UTF-8"),
        (f"u%FF:{SECRET}@h1,h2,h3", "url has bytes in its user that are not UTF-8"),
        (f"u:{SECRET}%0A@h1,h2,h3", "url has a control character in its password"),
        (f"u:{SECRET}#@h1,h2,h3", "url has a '#'"),
    ],
)
def test_an_error_names_the_part_and_repeats_nothing(scheme: str, hosts: str, part: str):
    with pytest.raises(ConfigurationError) as refused:
        from_url(url_of(scheme, hosts))
    assert str(refused.value).startswith(part)
    assert SECRET not in everything_said(refused.value)


@pytest.mark.parametrize("host", ["h", "::1", "fe80::1%eth0", "127.0.0.1"])
@pytest.mark.parametrize("port", [None, 1])
def test_what_is_written_is_read_again(host: str, port: int | None):
    assert split_url(f"x://{joined(host, port)}").addresses() == ((host, port),)
