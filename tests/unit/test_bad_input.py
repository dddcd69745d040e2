"""
Every parameter against every kind of nonsense.

Refused when built, by its name and with the way out; nothing is sent to the store.
"""

import asyncio
import datetime as dt
import enum
import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
from inside import LoopClock, label_of, memory_on, on_clock
from virtual_time import in_virtual_time

from fencing_sdk import ConfigurationError, LockClient, connect, sync
from fencing_sdk.backends import BUILTIN, from_url
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.postgresql import DRIVER_OPTIONS as LIBPQ_OPTIONS
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations import aiohttp, asgi, fastapi, wsgi

HUGE = "x" * 1_000_000
NAN, INF = math.nan, math.inf
ODD_NAMES = ["}", "{}", " ", "/", "..", "%", "\\", "*?[]", "'\";", "🔒", "a" * 512, "\u00e8", "e\u0300"]


class Unasked(MemoryBackend):
    """A store that notes every request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[object] = []

    async def draw(self, claim, **options):
        self.requests.append(claim)
        return await super().draw(claim, **options)

    async def inspect(self, name: str) -> Any:
        self.requests.append(name)
        return await super().inspect(name)


class Loud:
    """Not a value of any kind, and proud of it."""

    def __repr__(self) -> str:
        return "loud\nCRITICAL forged"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __bool__ = __eq__ = __hash__ = __repr__


NOT_SECONDS = [
    True,
    False,
    "5",
    "",
    HUGE,
    "1\n2",
    b"5",
    bytearray(b"5"),
    Decimal(5),
    Fraction(5),
    5j,
    [],
    [5],
    (),
    {},
    {5},
    object(),
    Loud(),
    Broken(),
    Ellipsis,
    int,
    dt.date(2024, 1, 1),
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    dt.time(0, 0, 5),
    NAN,
    INF,
    -INF,
    10**400,
    -(10**400),
    10**5000,
    -1,
    -1e-9,
    -5e-324,
    dt.timedelta(seconds=-1),
    dt.timedelta.min,
]
NOT_TEXT = [
    0,
    5,
    True,
    1.5,
    NAN,
    b"text",
    bytearray(b"x"),
    Decimal(5),
    5j,
    [],
    ["a"],
    (),
    ("a",),
    {},
    object(),
    Loud(),
    Broken(),
]
NOT_ON_A_LINE = [
    "a\0b",
    "\0",
    "a\nb",
    "a\r\nb",
    "\t",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "\ud800",
    "a\udfffb",
    HUGE,
    "a" * 513,
    "è" * 257,
]
NOT_A_COLLECTION = [None, 0, 5, True, 1.5, object(), Loud(), Broken()]


async def an_async_function(_: object) -> float:
    return 1.0


class GoodGuard(MemoryGuard):
    """Has all that a guard has; the class itself is not a guard."""


LOCK_PARAMETERS: dict[str, list[object]] = {
    "name": [None, "", *NOT_TEXT, *NOT_ON_A_LINE, Path("seats")],
    "ttl": [*NOT_SECONDS, None, 0, 0.0, 4e-4, 0.0499, dt.timedelta(0), 86_400.001, 2**53, 1e300, dt.timedelta.max],
    "wait": NOT_SECONDS,
    "safety_buffer": [*NOT_SECONDS, 15, 14.85, 1e9, dt.timedelta.max],
    "heartbeat_interval": [*NOT_SECONDS, 0, 0.0, dt.timedelta(0), 1e-9, 4, 15, 1e9],
    "max_hold": [*NOT_SECONDS, 0, 0.0, -0.0, dt.timedelta(0)],
    "label": [*NOT_TEXT, "a\0b", "\ud800", "x" * 1025, HUGE],
    "fences": [
        *NOT_A_COLLECTION,
        "seats",
        b"seats",
        {"a": 1},
        MemoryGuard(),
        iter([MemoryGuard()]),
        [None],
        ["seats"],
        [object()],
        [Loud()],
        [Broken()],
        [MemoryGuard],
        [GoodGuard],
        [MemoryGuard(), None],
        (MemoryGuard(), "seats"),
        [()],
        [(MemoryGuard(),)],
        [("seats", MemoryGuard())],
        [(MemoryGuard(), "seats", 1)],
        [[MemoryGuard(), "seats"]],
        [(MemoryGuard(), 5)],
        [(MemoryGuard(), "")],
        [(MemoryGuard(), "a\nb")],
        [(MemoryGuard(), HUGE)],
        [(MemoryGuard, "seats")],
    ],
    "backoff": [
        None,
        0,
        1.0,
        True,
        "exponential",
        [],
        object(),
        Loud(),
        Broken(),
        dt.timedelta(1),
        tenacity.wait_fixed,
        an_async_function,
    ],
}
CLIENT_PARAMETERS: dict[str, list[object]] = {
    "namespace": [None, *NOT_TEXT, *NOT_ON_A_LINE],
    "observers": [
        *NOT_A_COLLECTION,
        "print",
        b"print",
        print,
        [None],
        ["print"],
        [print, 5],
        [Loud()],
        [Broken()],
        [an_async_function],
        {"a": print},
    ],
}
BACKENDS = [
    None,
    5,
    True,
    b"memory://",
    object(),
    Loud(),
    Broken(),
    [],
    {},
    Path("locks.db"),
    SimpleNamespace(acquire=1),
    MemoryBackend,
]
URLS = [
    "",
    " ",
    "memory",
    "memory:/",
    "://",
    "\0",
    "memory://\n",
    "memory://a b",
    "memory:///x",
    "nosuch://host",
    HUGE,
    f"x://{HUGE}",
]
OPTIONS: dict[str, dict[str, list[object]]] = {
    "memory": {"tokens": [None, "", "serial", "HYBRID", 5, True, b"hybrid", [], HUGE, "a\nb", "\0", Loud()]},
    "sqlite": {
        "tokens": [None, "", "serial", "HYBRID", 5, True, b"hybrid", [], HUGE, "a\nb", "\0", Loud()],
        "synchronous": [None, "", "off", "FULL", 5, True, b"full", [], HUGE, "a\nb", "\0", Loud()],
    },
}
OPTIONS["rediss"] = {
    "prefix": [None, "", 5, True, b"fencing", [], "a\nb", "\0", "a{b}", "x" * 600, Loud()],
    "tokens": OPTIONS["memory"]["tokens"],
    "min_replicas": [None, "", -1, 1.5, True, "two", b"1", [], HUGE, 10**6, "\u0661", Loud()],
    **{option: [None, "", b"text", []] for option in DRIVER_OPTIONS},
}
OPTIONS["rediss+quorum"] = {"prefix": OPTIONS["rediss"]["prefix"]} | {
    option: OPTIONS["rediss"][option] for option in DRIVER_OPTIONS
}
OPTIONS["postgresql"] = {
    "schema": [None, "", 5, True, b"fencing", [], "a\0b", "pg_temp", "$user", "x" * 64, "\ud800", HUGE, Loud()],
    "tokens": OPTIONS["memory"]["tokens"],
    "create": [None, "", "maybe", 5, 2.0, b"true", [], "a\nb", Loud()],
    "pooled": [None, "", "maybe", 5, 2.0, b"true", [], "a\nb", Loud()],
    "connect_timeout": [None, "", 0, -1, True, math.nan, math.inf, "soon", [], Loud()],
    **{option: [None, "", b"text", [], 5, Loud()] for option in LIBPQ_OPTIONS},
}
OPTIONS["mysql"] = {
    "tokens": OPTIONS["memory"]["tokens"],
    "create": OPTIONS["postgresql"]["create"],
    "bell": OPTIONS["postgresql"]["create"],
    "connect_timeout": OPTIONS["postgresql"]["connect_timeout"],
    "unix_socket": ["", 5, True, b"/run/s", [], "run/s", Loud()],
    "tls": OPTIONS["postgresql"]["create"],
    **{option: ["", 5, True, b"", [], "no/such/file.pem", "a\nb", "\0", Loud()] for option in ("ca", "cert", "key")},
    "ssl_context": ["", 5, True, b"", [], "a\nb", Loud()],
}
_FILE: list[object] = ["", 5, True, b"", [], "no/such/file.pem", "a\nb", "\0", Loud()]
_TIMEOUT: list[object] = [None, "", 0, -1, True, math.nan, math.inf, "soon", [], Loud()]
OPTIONS["kahuna+https"] = {"ca": _FILE, "cert": _FILE, "key": _FILE, "connect_timeout": _TIMEOUT}
OPTIONS["etcd+https"] = {
    "prefix": [None, "", 5, True, b"fencing", [], "a\nb", "\0", "a b", "\u00e8", "x" * 257, Loud()],
    "user": ["", 5, True, b"root", [], "root", Loud()],
    "password": ["", 5, True, b"secret", [], "secret", Loud()],
    **OPTIONS["kahuna+https"],
}
OPTIONS["zk"] = {
    "acl": ["", 5, True, b"creator", [], "CREATOR", "creator", [1], "a\nb", Loud()],
    "sasl": ["", 5, b"", [], {}, {"user": "a"}, {"mechanism": 5}, {5: "a"}, "mechanism", Loud()],
    "tls": [None, "", 5, b"true", [], "maybe", Loud()],
    "ca": ["", 5, True, b"", [], "no/such/file.pem", "a\nb", Loud()],
    "cert": ["", 5, True, b"", [], "no/such/file.pem", Loud()],
    "key": ["", 5, True, b"", [], "no/such/file.pem", Loud()],
    "connect_timeout": [None, "", 0, -1, True, math.nan, math.inf, "soon", [], Loud()],
}
URL_OF = {
    "etcd+https": "etcd+https://localhost",
    "kahuna+https": "kahuna+https://localhost",
    "memory": "memory://",
    "postgresql": "postgresql://localhost/app",
    "sqlite": "sqlite:///locks.db",
    "rediss": "rediss://localhost",
    "rediss+quorum": "rediss+quorum://a,b,c",
    "mysql": "mysql://localhost/app",
    "zk": "zk://localhost",
}


def rows(table: dict[str, list[object]]) -> list[Any]:
    return [
        pytest.param(
            parameter,
            value,
            id=f"{parameter}-{number}-{label(value)}",
        )
        for parameter, values in table.items()
        for number, value in enumerate(values)
    ]


def label(value: object) -> str:
    return ascii(value)[:24] if isinstance(value, str | bytes | float | None) else type(value).__name__


WAY_OUT = re.compile(r"\b(must|make|use|needs|escape|write|known are|pass|set|decorates)\b")


def refuse(build: Callable[[], object], *names: str) -> str:
    """Build something that must be refused, by an error that can be shown to anybody and acted upon."""
    with pytest.raises(ConfigurationError) as caught:
        build()
    text = str(caught.value)
    assert text.startswith(names), f"does not begin with the parameter: {text}"
    assert WAY_OUT.search(text), f"does not tell the way out: {text}"
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 400
    return text


@pytest.mark.parametrize(("parameter", "value"), rows(LOCK_PARAMETERS))
def test_a_lock_that_cannot_work_is_refused_when_it_is_described(parameter, value):
    store = Unasked()
    client = LockClient(store)
    arguments = {"name": "seats/42", parameter: value}
    names = (parameter, "resource") if parameter == "fences" else (parameter,)
    refuse(lambda: client.lock(**arguments), *names)
    assert store.requests == []


@pytest.mark.parametrize(("parameter", "value"), rows(LOCK_PARAMETERS))
def test_a_decorator_that_cannot_work_is_refused_when_it_decorates(parameter, value):
    store = Unasked()
    client = LockClient(store)
    arguments = {"name": "seats/42", parameter: value}
    called = []

    async def book() -> None:
        called.append(1)

    names = (parameter, "resource") if parameter == "fences" else (parameter,)
    refuse(lambda: client.locking(**arguments)(book), *names)
    assert store.requests == called == []


@pytest.mark.parametrize(("parameter", "value"), rows(CLIENT_PARAMETERS))
def test_a_client_that_cannot_work_is_refused_when_it_is_built(parameter, value):
    store = Unasked()
    refuse(lambda: LockClient(store, **{parameter: value}), parameter)
    assert store.requests == []


@pytest.mark.parametrize(("parameter", "value"), rows(CLIENT_PARAMETERS))
def test_connecting_checks_what_the_client_checks(parameter, value):
    refuse(lambda: connect("memory://", **{parameter: value}), parameter)


@pytest.mark.parametrize("observers", [*NOT_A_COLLECTION, print], ids=label)
def test_connecting_checks_the_observers_also_where_a_recorder_joins_them(observers, monkeypatch, tmp_path):
    monkeypatch.setenv("FENCING_RECORD", str(tmp_path / "run.jsonl"))
    refuse(lambda: connect("memory://", observers=observers), "observers")


@pytest.mark.parametrize("flag", ["yes", 1, None])
@pytest.mark.parametrize(
    "build",
    [
        lambda flag: aiohttp.guard_middleware(MemoryGuard(), resource="a/{b}", required=flag),
        lambda flag: aiohttp.fencing_middleware(["http://a"], required=flag),
        lambda flag: aiohttp.fencing_middleware(["http://a"], raise_stale=flag),
        lambda flag: asgi.FencingMiddleware(print, MemoryGuard(), resource="a/{b}", required=flag),
        lambda flag: fastapi.Fenced(MemoryGuard(), resource="a/{b}", required=flag),
        lambda flag: fastapi.Presented(required=flag),
    ],
)
def test_a_switch_is_true_or_false(build, flag):
    with pytest.raises(ConfigurationError, match=r"(interrupt|required|raise_stale) must be True or False"):
        build(flag)


@pytest.mark.parametrize("guard", [None, MemoryGuard()], ids=["no guard", "a guard"])
@pytest.mark.parametrize("resource", [5, b"a/{b}", ["a/{b}"]], ids=label)
@pytest.mark.parametrize(
    "build",
    [
        aiohttp.guard_middleware,
        lambda guard, **options: asgi.FencingMiddleware(print, guard, **options),
        lambda guard, **options: wsgi.GuardedApplication(print, guard, locks=sync.connect("memory://"), **options),
    ],
    ids=["aiohttp", "asgi", "wsgi"],
)
def test_a_middleware_is_told_how_resources_are_named(build, guard, resource):
    with pytest.raises(ConfigurationError, match=r"resource must be a template such as 'seats/{seat}' or a callable"):
        build(guard, resource=resource)


@pytest.mark.parametrize("client", [5, None, "memory://", sync.connect("memory://")], ids=label)
@pytest.mark.parametrize(
    "build",
    [asgi.lifespan, aiohttp.cleanup_ctx, lambda client: fastapi.Leased(client, "a")],
    ids=["lifespan", "cleanup_ctx", "Leased"],
)
def test_what_is_no_client_for_tasks_is_refused(build, client):
    with pytest.raises(ConfigurationError, match=r"a client of fencing_sdk\.connect is needed here"):
        build(client)


@pytest.mark.parametrize(
    "call", [lambda: (5,), lambda: (lambda: 5,), lambda: (len, "abc"), lambda: (asyncio.sleep(0),)], ids=range(4)
)
def test_a_thread_has_async_functions_run_and_nothing_else(call):
    with sync.connect("memory://") as locks:
        with pytest.raises(ConfigurationError, match=re.escape("run() calls an 'async def' function")):
            locks.run(*call())
        assert locks.run(lambda: asyncio.sleep(0, "a function that returns a coroutine")) is not None


@pytest.mark.parametrize("backend", BACKENDS, ids=label)
def test_what_is_no_backend_is_refused(backend):
    refuse(lambda: LockClient(backend), "backend")


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=label)
def test_what_is_neither_a_url_nor_a_backend_is_refused(backend):
    refuse(lambda: connect(backend), "url")


@pytest.mark.parametrize("url", URLS, ids=label)
def test_a_url_that_leads_nowhere_is_refused(url):
    refuse(lambda: connect(url), "url", "no backend for", "memory://")


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_url_the_environment_has_to_have_one(monkeypatch, value):
    monkeypatch.delenv("FENCING_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("FENCING_URL", value)
    refuse(connect, "connect")


@pytest.mark.parametrize(
    ("scheme", "option", "value"),
    [
        pytest.param(scheme, option, value, id=f"{scheme}-{option}-{number}-{label(value)}")
        for scheme, options in OPTIONS.items()
        for option, values in options.items()
        for number, value in enumerate(values)
    ],
)
def test_a_bad_option_of_a_backend_is_refused_before_it_is_opened(scheme, option, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse(lambda: connect(URL_OF[scheme], **{option: value}), option)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", OPTIONS)
def test_an_option_nobody_knows_is_refused_and_the_known_ones_are_listed(scheme):
    for build in (
        lambda: connect(URL_OF[scheme], ttl=5),
        lambda: connect(URL_OF[scheme], toekns="counter"),
        lambda: connect(f"{URL_OF[scheme]}?ttl=5"),
    ):
        text = refuse(build, "unknown option")
        assert all(option in text for option in OPTIONS[scheme])


def test_the_options_of_every_built_in_backend_are_tried_here():
    assert {BUILTIN[scheme].module for scheme in OPTIONS} == {builtin.module for builtin in BUILTIN.values()}
    for scheme, options in OPTIONS.items():
        with pytest.raises(ConfigurationError) as caught:
            from_url(URL_OF[scheme], nobody="knows")
        assert str(caught.value).endswith(f"known are {', '.join(options)}")


def test_a_backend_object_takes_no_options():
    assert "tokens" in refuse(lambda: connect(MemoryBackend(), tokens="counter"), "a backend object")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.lock("a", tll=5),
        lambda client: client.lock("a", timeout=5),
        lambda client: client.lock("a", 5),
        lambda client: client.lock(),
        lambda client: client.locking("a", tll=5),
        lambda client: client.locking("a", blocking=False),
        lambda client: LockClient(MemoryBackend(), namespce="a"),
        lambda client: LockClient(MemoryBackend(), "a"),
        lambda client: LockClient(),
    ],
)
def test_an_unknown_keyword_is_a_type_error_at_once(call):
    with pytest.raises(TypeError, match=r"unexpected keyword|positional"):
        call(LockClient(MemoryBackend()))


@pytest.mark.parametrize("name", [None, "", *NOT_TEXT, *NOT_ON_A_LINE], ids=label)
async def test_inspecting_a_bad_name_asks_nobody(name):
    store = Unasked()
    async with LockClient(store) as client:
        with pytest.raises(ConfigurationError, match=r"^name "):
            await client.inspect(name)
    assert store.requests == []


@pytest.mark.parametrize("function", [print, None, 5, "book", lambda: None, LockClient, Loud()], ids=label)
def test_what_is_no_coroutine_function_cannot_be_decorated(function):
    text = refuse(lambda: LockClient(MemoryBackend()).locking("seats/42", ttl=5)(function), "locking")
    assert "async def" in text


async def test_arguments_that_make_a_bad_name_send_nothing():
    store = Unasked()
    ran = []
    async with LockClient(store) as client:

        @client.locking("{seat}")
        async def book(seat: str) -> None:
            ran.append(seat)

        for seat in ("", "a\nb", "\ud800", HUGE):
            with pytest.raises(ConfigurationError, match=r"^name "):
                await book(seat)
    assert store.requests == ran == []


class Seat(enum.IntEnum):
    TTL = 7


class OtherFloat(float):
    """Such as numpy.float64."""


GOOD: list[dict[str, Any]] = [
    {"ttl": 0.05},
    {"ttl": 86_400},
    {"ttl": dt.timedelta(days=1)},
    {"ttl": dt.timedelta(milliseconds=500)},
    {"ttl": Seat.TTL},
    {"ttl": OtherFloat(1.5)},
    {"wait": 0},
    {"wait": 0.0},
    {"wait": -0.0},
    {"wait": None},
    {"wait": 1e300},
    {"wait": dt.timedelta.max},
    {"wait": 5e-324},
    {"safety_buffer": 0},
    {"safety_buffer": None},
    {"safety_buffer": dt.timedelta(seconds=1)},
    {"heartbeat_interval": 0.001},
    {"max_hold": 1e300},
    {"max_hold": None},
    {"label": ""},
    {"label": None},
    {"label": "🔒" * 1024},
    {"label": 'line\nbreak\ttab "quote" \\'},
    {"fences": ()},
    {"fences": []},
    {"fences": [MemoryGuard()]},
    {"fences": ((MemoryGuard(), "other"), MemoryGuard())},
    {"fences": [GoodGuard(), (GoodGuard(), "è")]},
    {"backoff": tenacity.wait_none()},
    {"backoff": tenacity.wait_fixed(1) + tenacity.wait_random(0, 1)},
    {"backoff": lambda state: 0.1},
    *({"name": name} for name in ODD_NAMES),
]


@pytest.mark.parametrize("options", GOOD, ids=lambda options: re.sub("0x[0-9a-f]+", "", ascii(options))[:40])
@in_virtual_time  # a machine that is busy would need more than the shortest ttl
async def test_an_odd_value_that_makes_sense_is_accepted_and_works(options):
    clock = LoopClock()
    async with on_clock(LockClient(memory_on(clock)), clock) as client:
        async with client.lock(**({"name": "seats/42"} | options)) as lease:
            assert lease.token
            assert lease.name == options.get("name", "seats/42")
            holder = await client.inspect(lease.name)
        assert holder.label == (label_of(options.get("label")) or None)
