"""Texts that anybody may have written: URLs, headers and templates of names."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import IPv6Address
from urllib.parse import quote, unquote, urlsplit

import hypothesis.strategies as st
import pytest
from fuzzing import SEED_SIZE, checked, little_work, long_ones, pieces
from hypothesis import assume, example, given
from inside import TOKEN_LIMIT
from refused_urls import refuse_every_url

from fencing_sdk._name_template import NameTemplate
from fencing_sdk._values.token import Token, check_token, format_token, parse_token, parse_written
from fencing_sdk._values.url import StoreUrl, split_url
from fencing_sdk.backends import BUILTIN, from_url
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.integrations._incoming import RouteTemplate, check_resource, presented
from fencing_sdk.integrations._problem import RequestRefused
from fencing_sdk.integrations.messages import token_of

# Whatever a URL is: a backend, or one error that says what to do and repeats nothing of the URL.


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
    *("tokens=", "counter", "hybrid", "synchronous=", "full", "db=", "prefix=", "retention=", "inf", "nan"),
    *("ssl_cert_reqs=", "none", "socket_timeout=", "min_replicas=", "ca=", "9" * 30),
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
    assert callable(backend.draw)
    return ""


@every_scheme
@checked(30)
@given(rest=pieces(*PARTS))
@example(rest="h:" + "1" * 5000)
@example(rest="h?connect_timeout=1e999")
@example(rest="[")
@example(rest="[::1%25eth0]")
@example(rest="\u2100")
def test_a_url_is_a_backend_or_a_configuration_error(scheme: str, rest: str):
    opened(f"{scheme}://{rest}")


@every_scheme
@checked(30)
@given(before=pieces(*PARTS, most=3), after=pieces(*PARTS, most=6))
@example(before="/%00", after="")
def test_a_password_is_not_repeated_wherever_it_stands(scheme: str, before: str, after: str):
    assert SECRET not in opened(f"{scheme}://{before}{SECRET}{after}")


@checked(200)
@given(url=pieces("redis", "memory", "kahuna", "sqlite", ":", "//", "://", "+", "\n", "\0", *PARTS[:20]))
def test_any_text_is_a_backend_or_a_configuration_error(url: str):
    opened(url)


@pytest.mark.slow
@every_scheme
def test_a_long_url_is_little_work(scheme: str):
    for rest in long_ones("a", "[", "%", "%41", "@", ",", "a,", ":", "/", "?", "&a=b", "//@", "[::1],", "1"):
        with little_work():
            opened(f"{scheme}://{rest}")
            opened(f"{scheme}://h?{rest}")


@checked(100)
@given(
    option=st.sampled_from(["tokens", "synchronous", "connect_timeout", "retention", "db"]),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers())),
    scheme=st.sampled_from(["memory", "sqlite", "kahuna", "redis", "redis+cluster"]),
)
def test_an_option_of_any_type_is_taken_or_a_configuration_error(option: str, value: object, scheme: str):
    place = {"memory": "", "sqlite": "/locks.db"}.get(scheme, "localhost")
    try:
        from_url(f"{scheme}://{place}", **{option: value})
    except ConfigurationError:
        return


# What comes in a header: the token that was meant, or a refusal, and two readers never disagree.


TEXTS = pieces(
    "0", "34", "9007199254740991", ";holder=", '"9f8a01c2"', '"', ";", ";a=", " ", "\t", "+", "-", "_", "\u0663", ","
)
HOLDERS = st.one_of(st.none(), st.text("0123456789abcdef", min_size=1, max_size=64))


@checked(200)
@given(
    text=st.one_of(TEXTS, st.text(max_size=100), st.binary(max_size=20), st.none(), st.integers(), st.lists(st.text()))
)
@example(text="1" * 5000)
@example(text="34\n")
@example(text="9007199254740992")
def test_any_text_is_a_token_that_can_be_passed_on_or_is_refused(text: object):
    try:
        token = parse_token(text)
    except ConfigurationError:
        return
    assert 0 <= token < TOKEN_LIMIT
    passed_on = parse_written(format_token(token))
    assert (passed_on, passed_on.holder) == (token, token.holder)
    assert text.strip(" ").startswith(f"{token:d}")


@checked(200)
@given(number=st.integers(0, TOKEN_LIMIT - 1), holder=HOLDERS)
def test_a_token_that_is_sent_arrives(number: int, holder: str | None):
    token = Token(number, holder)
    arrived = parse_token(format_token(token))
    assert (arrived, arrived.holder) == (number, holder)


@checked(200)
@given(number=st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=5), st.decimals(), st.none()))
@example(number=10**5000)
def test_what_is_no_token_is_not_taken_for_one(number: object):
    try:
        token = check_token(number)
    except ConfigurationError:
        return
    assert type(number) is int
    assert token == number


@checked(200)
@given(number=st.integers(0, TOKEN_LIMIT - 1), holder=st.text(max_size=70))
def test_a_holder_that_would_not_be_read_back_is_not_sent(number: int, holder: str):
    try:
        text = format_token(Token(number, holder))
    except ConfigurationError:
        return
    assert parse_token(text).holder == holder


@checked(200)
@given(values=st.lists(TEXTS, max_size=3), old=st.lists(TEXTS, max_size=3))
def test_the_headers_of_a_request_have_one_token_or_none_or_are_refused(values: list[str], old: list[str]):
    try:
        token = presented(values, old)
    except RequestRefused:
        return
    assert (token is None) == (not values and not old)
    assert all(parse_token(text) == token for text in (*values, *old))


@checked(200)
@given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from(["Fencing-Token", "x-fencing-token", "FENCING-TOKEN", "other", "\u212aey", ""]),
            st.one_of(TEXTS, st.binary(max_size=20)),
        ),
        max_size=4,
    )
)
def test_the_headers_of_a_message_have_one_token_or_none_or_are_refused(pairs: list[tuple[str, str | bytes]]):
    try:
        token = token_of(pairs)
    except ConfigurationError:
        return
    assert (token is None) == (not [key for key, _ in pairs if "fencing-token" in key.lower()])


@checked(200)
@given(
    path=pieces("/seats/", "/", "42", "%2F", "..", "\0", "\n", "a" * 600),
    resource=st.sampled_from(["seats/{s}", "{f:path}"]),
)
def test_the_path_of_a_request_names_a_resource_or_is_refused(path: str, resource: str):
    try:
        named = RouteTemplate(resource).match(unquote(f"/{path}"), f"/{path}".encode())
        if named is not None:
            check_resource(named)
    except RequestRefused:
        return
    assert named is None or f"/{named}/" in f"{unquote(f'/{path}')}/"


@checked(200)
@given(template=pieces("{", "}", "{{", "}}", "{seat}", "{seat:path}", "{0}", "%", "%s", "!r", ":", "/", ".", "[0]"))
def test_a_template_of_resources_works_or_is_a_configuration_error(template: str):
    try:
        route = RouteTemplate(template)
    except ConfigurationError:
        return
    with suppress(RequestRefused):
        route.match(f"/{template}")


@pytest.mark.parametrize("text", long_ones("1", "0", ";", '34;holder="9f"', " ", "/", "a/", "\u0663"))
def test_a_long_header_or_path_is_little_work(text: str):
    with little_work():
        with pytest.raises(ConfigurationError):
            parse_token(text)
        with pytest.raises(RequestRefused):
            presented([text])
        for template in ("a/{b}/c/{d:path}", "{a}/x/{b}/{c}/y", "{a:path}"):
            with suppress(RequestRefused):
                RouteTemplate(template).match(f"/{text}", f"/{text}".encode())


# Templates of lock names.


NUMBERS = st.one_of(
    st.integers(-5, 100),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**53]),
    st.floats(),
    st.floats(0, 1e4, allow_nan=False),
)
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2))


class Anything:
    def __init__(self, value: object) -> None:
        self.value = value


async def function(a: object, b: object = 2) -> None: ...


TEMPLATES = pieces(
    "{a}", "{b}", "{", "}", "{{", "}}", "a", "[0]", ".value", "!r", "!x", ":", ":>9", ":{b}", "{0}", "{}", "/", "x"
)


@pytest.mark.slow
@checked(200)
@given(template=TEMPLATES, a=ANYTHING, b=ANYTHING)
@example(template="{a:{b}}", a="x", b="999999999")
@example(template="{a:{b}}", a=1.5, b=".999999999f")
@example(template="{a.value}", a=1, b=1)
@example(template="{a:d}", a=10**5000, b=1)
def test_a_template_makes_a_name_or_a_configuration_error(template: str, a: object, b: object):
    with little_work():
        try:
            name = NameTemplate(template, function).fill((a, b), {})
        except ConfigurationError:
            return
    assert isinstance(name, str)
    assert len(name) < SEED_SIZE
