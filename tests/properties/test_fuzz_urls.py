"""Whatever a URL is: a backend, or one error that says what to do and repeats nothing of the URL."""

import hypothesis.strategies as st
import pytest
from fuzzing import checked, little_work, long_ones, pieces
from hypothesis import example, given

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
