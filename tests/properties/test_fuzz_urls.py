"""Whatever a URL is: a backend, or one error that says what to do and repeats nothing of the URL."""

from ipaddress import IPv6Address
from urllib.parse import quote, urlsplit

import hypothesis.strategies as st
import pytest
from fuzzing import checked, little_work, long_ones, pieces
from hypothesis import assume, example, given
from refused_urls import refuse_every_url

from fencing_sdk._values.store_url import StoreUrl, split_url
from fencing_sdk.backends import BUILTIN, from_url
from fencing_sdk.errors import ConfigurationError

SECRET = "tr0ub4dor"

PARTS = (
    *(
        "/",
        "//",
        "?",
        "&",
        "=",
        "#",
        "@",
        ":",
        ",",
        "[",
        "]",
        "[::1]",
        "%",
        "%2F",
        "%ff",
        "%00",
        ";",
        "\\",
        " ",
        "\u2028",
    ),
    *("localhost", "host:6379", "user:", "6379", ":99999", "0", "-1", "1e9", "mymaster", "/locks.db", ":memory:"),
    *("tokens=", "counter", "hybrid", "synchronous=", "full", "db=", "prefix=", "fair=", "retention=", "inf", "nan"),
    *("ssl_cert_reqs=", "none", "socket_timeout=", "min_replicas=", "durability=", "ca=", "connections=", "9" * 30),
    *("connect_timeout=", "ssl_context=", "sentinel_password=", "client_name=", "\ud800", "\u0130", "\u00b2", "\uff10"),
)
every_scheme = pytest.mark.parametrize("scheme", sorted(BUILTIN))


ports = st.one_of(st.none(), st.integers(1, 65535))
names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)
zones = st.one_of(st.just(""), st.from_regex(r"%25[a-z0-9.~_-]{1,8}", fullmatch=True))
ipv6 = st.builds(lambda number, zone: (f"{IPv6Address(number)}", zone), st.integers(0, 2**128 - 1), zones)
no_control = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=8)


def written(host: str | tuple[str, str], port: int | None) -> str:
    text = host if isinstance(host, str) else f"[{''.join(host)}]"
    return text if port is None else f"{text}:{port}"


@checked(500)
@given(
    hosts=st.lists(st.tuples(st.one_of(names, ipv6), ports), min_size=1, max_size=5),
    login=st.one_of(st.none(), st.tuples(no_control, no_control)),
    path=st.sampled_from(["", "/", "/0", "/a/b"]),
)
def test_what_is_written_into_a_url_is_read_from_it(hosts, login, path: str):
    user, password = login or (None, None)
    at = "" if login is None else f"{quote(user, safe='')}:{quote(password, safe='')}@"
    with pytest.MonkeyPatch.context() as patch:
        refuse_every_url(patch)
        parts = split_url(f"x://{at}{','.join(written(*host) for host in hosts)}{path}?a=b")
    assert (parts.user, parts.password, parts.path, parts.query) == (user, password, path, "a=b")
    assert list(parts.addresses()) == [
        (host if isinstance(host, str) else host[0] + host[1].replace("%25", "%"), port) for host, port in hosts
    ]


def read(url: str) -> StoreUrl | None:
    try:
        parts = split_url(url)
        parts.addresses()
    except ConfigurationError:
        return None
    return parts


@checked(500)
@given(rest=pieces(*PARTS, "u:p@", "h.example", most=6))
@example(rest="u:p@h:1/a?b=c")
@example(rest="u:p@[::1]:1")
def test_a_url_of_one_host_is_read_as_urlsplit_reads_it_or_refused(rest: str):
    parts = read(f"x://{rest}")
    assume(parts is not None and "," not in rest and "%" not in rest and rest.isprintable())
    known = urlsplit(f"x://{rest}")
    [address] = parts.addresses()
    assert (address.host, address.port) == (known.hostname, known.port)
    assert (parts.user, parts.password) == (known.username, known.password)
    assert (parts.path, parts.query) == (known.path, known.query)


def opened(url: str) -> str:
    """Open *url*; return what the error says, the empty text where there is none."""
    try:
        backend = from_url(url)
    except ConfigurationError as error:
        return f"{error} {error.__cause__}"
    assert callable(backend.acquire)
    return ""


@every_scheme
@checked(30)
@given(rest=pieces(*PARTS))
@example(rest="h:" + "1" * 5000)
@example(rest="h?connections=" + "1" * 5000)
@example(rest="h?connect_timeout=1e999")
@example(rest="[")
@example(rest="[::1%25eth0]")
@example(rest="\u2100")
def test_a_url_is_a_backend_or_a_configuration_error(scheme: str, rest: str):
    opened(f"{scheme}://{rest}")


@every_scheme
@checked(30)
@given(before=pieces(*PARTS, most=3), after=pieces(*PARTS, most=6))
def test_a_password_is_not_repeated_wherever_it_stands(scheme: str, before: str, after: str):
    assert SECRET not in opened(f"{scheme}://{before}{SECRET}{after}")


@checked(200)
@given(url=pieces("redis", "memory", "kahuna", "sqlite", ":", "//", "://", "+", "\n", "\0", *PARTS[:20]))
def test_any_text_is_a_backend_or_a_configuration_error(url: str):
    opened(url)


@every_scheme
def test_a_long_url_is_little_work(scheme: str):
    for rest in long_ones("a", "[", "%", "%41", "@", ",", "a,", ":", "/", "?", "&a=b", "//@", "[::1],", "1"):
        with little_work():
            opened(f"{scheme}://{rest}")
            opened(f"{scheme}://h?{rest}")


@checked(100)
@given(
    option=st.sampled_from(
        ["tokens", "synchronous", "durability", "connect_timeout", "connections", "retention", "db"]
    ),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers())),
    scheme=st.sampled_from(["memory", "sqlite", "kahuna", "redis", "redis+cluster"]),
)
def test_an_option_of_any_type_is_taken_or_a_configuration_error(option: str, value: object, scheme: str):
    place = {"memory": "", "sqlite": "/locks.db"}.get(scheme, "localhost")
    try:
        from_url(f"{scheme}://{place}", **{option: value})
    except ConfigurationError:
        return
