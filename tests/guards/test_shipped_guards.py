"""Promises of all guards that are shipped, of their page, and of their verdicts."""

from __future__ import annotations

import itertools
import pkgutil
import re
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path

import mysql_ways
import postgresql_ways
import pytest
from mysql_programs import flavours
from prometheus_client import CollectorRegistry

from fencing_sdk import ConfigurationError, LockClient, StaleTokenError, Token, guards
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards import admitted
from fencing_sdk.guards.etcd import EtcdGuard, put
from fencing_sdk.guards.files import FileGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.prometheus import PrometheusMetrics
from fencing_sdk.testing.promises.fences import NO_RESOURCES

pytest_plugins = ["etcd_fixtures", "kahuna_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures"]


# What is true of every guard that is shipped, and more than the contract asks for.


SHIPPED = {
    "memory": lambda path, **options: MemoryGuard(**options),
    "sql": lambda path, **options: SqlGuard(path / "app.db", **options),
    "files": lambda path, **options: FileGuard(path / "files", **options),
}


SERVED = {"redis": RedisGuard, "etcd": EtcdGuard, "kahuna": KahunaGuard}


@pytest.fixture
def heard():
    """The events of the guard."""
    return []


@asynccontextmanager
async def on_postgresql(request):
    async with postgresql_ways.opened("asyncpg", request.getfixturevalue("postgresql_server").url) as way:
        yield way


@asynccontextmanager
async def on_mysql(request, *, flavour):
    with request.getfixturevalue("shared_mysql")(flavour).fresh_database() as server:
        async with mysql_ways.opened("asyncmy", server.url) as way:
            yield way


SQL_SERVERS = {
    "sql on postgresql": on_postgresql,
    **{f"sql on {flavour}": partial(on_mysql, flavour=flavour) for flavour in flavours()},
}


@pytest.fixture
def counted():
    """A meter, which counts the tokens that the guard accepts."""
    return PrometheusMetrics(registry=CollectorRegistry(), lock_label=str)


@pytest.fixture
def ways():
    """To a transaction of the guard's server, if that is one of SQL."""
    return []


@pytest.fixture(params=[*SHIPPED, *SERVED, *SQL_SERVERS])
async def guard(request, tmp_path, redis_server, etcd_server, kahuna_server, heard, counted, ways):
    servers = {"redis": redis_server, "etcd": etcd_server, "kahuna": kahuna_server}
    options = {"observers": [heard.append, counted]}
    async with AsyncExitStack() as stack:
        if request.param in SERVED:
            yield await stack.enter_async_context(SERVED[request.param](servers[request.param].url, **options))
        elif request.param in SQL_SERVERS:
            ways.append(await stack.enter_async_context(SQL_SERVERS[request.param](request)))
            yield SqlGuard(ways[0].url, **options)
        else:
            yield SHIPPED[request.param](tmp_path, **options)


async def write(guard, token, path, ways):
    """Write by *guard*, with a token."""
    match guard:
        case MemoryGuard():
            guard.write("a", token, int)
        case FileGuard() | KahunaGuard():
            await guard.write("a", token, b"data")
        case RedisGuard():
            await guard.set("a", token, "x", 1)
        case EtcdGuard():
            await guard.execute("a", token, put("x", "1"))
        case SqlGuard(database=None):
            with closing(sqlite3.connect(path / "app.db")) as connection, connection:
                guard.admit_sync(connection, "a", token)
        case SqlGuard():
            async with ways[0].begin() as transaction:
                await guard.admit(transaction, "a", token)


async def test_observers_are_told_which_fence_was_raised_and_which_token_was_refused(
    guard, heard, counted, tmp_path, ways
):
    new, old, other = Token(34, "bbbbbbbb"), Token(33, "aaaaaaaa"), Token(34, "cccccccc")
    await guard.raise_to("a", new)
    await write(guard, new, tmp_path, ways)
    for token in (old, other):
        with pytest.raises(StaleTokenError):
            await write(guard, token, tmp_path, ways)
        with pytest.raises(StaleTokenError):
            await guard.raise_to("a", token)
    ((labels, series),) = counted.made.items()
    accepted = counted._counters["accepted"].labels(*labels)._value.get()
    assert (labels, accepted, series.highest) == (("a", "lock"), 2, 34), "the raise, and one write"
    raised, *refused = heard
    assert (raised.kind, raised.name, raised.resource, raised.token) == ("fence_raised", "a", "a", 34)
    assert {(event.kind, event.name, event.resource, event.fence) for event in refused} == {
        ("stale_rejected", "a", "a", 34)
    }
    assert [(event.token, event.holder, event.conflict) for event in refused] == [
        *[(33, "aaaaaaaa", False)] * 2,
        *[(34, "cccccccc", True)] * 2,
    ]
    assert sorted(event.at for event in heard) == [event.at for event in heard]


def test_the_list_is_complete():
    assert {module.name for module in pkgutil.iter_modules(guards.__path__) if module.name[0] != "_"} == {
        *SHIPPED,
        *SERVED,
    }


@pytest.mark.parametrize("guard", SERVED, indirect=True)
async def test_a_guard_that_was_closed_opens_again_and_is_closed_again(guard):
    """One behaviour for all guards with connections of their own: no connection is left behind."""
    for token in (34, 35):
        async with guard:
            await guard.raise_to("a", token)
    await guard.raise_to("a", 36)
    await guard.aclose()
    await guard.aclose()


@pytest.mark.parametrize("resource", NO_RESOURCES, ids=lambda resource: ascii(resource)[:20])
async def test_asking_for_what_names_no_resource_is_an_error(guard, resource):
    with pytest.raises(ConfigurationError):
        await guard.highest(resource)


async def test_a_fence_that_is_ahead_fails_the_acquisition_and_gives_the_lock_back(guard):
    """The store forgot what it had granted, and the resource did not."""
    await guard.raise_to("invoices/42", 1_000)
    store = MemoryBackend(tokens="counter")
    async with LockClient(store) as locks:
        with pytest.raises(StaleTokenError):
            async with locks.lock("invoices/42", fences=[guard]):
                pytest.fail("the body must not run")
        assert await locks.inspect("invoices/42") is None


@pytest.mark.every_loop
async def test_a_resource_may_be_named_unlike_its_lock(guard):
    async with LockClient(MemoryBackend()) as locks, locks.lock("a", fences=[(guard, "b"), (guard, "c")]) as lease:
        assert await guard.highest("a") is None
        assert [await guard.highest("b"), await guard.highest("c")] == [lease.token] * 2
        assert (await guard.highest("b")).holder == lease.holder


async def test_a_refusal_leaves_the_body_bare_and_is_told_to_the_clients_observers(guard):
    events, store = [], MemoryBackend()
    async with LockClient(store, observers=[events.append]) as locks:
        zombie = await locks.lock("a").acquire()
        stale = zombie.token
        store.take_away("a")
        async with locks.lock("a", fences=[guard]):
            with pytest.raises(StaleTokenError):
                await guard.raise_to("a", stale)
        with pytest.raises(StaleTokenError):
            async with locks.lock("b"):
                await guard.raise_to("a", stale)
    assert [event.kind for event in events if event.kind in {"fence_raised", "stale_rejected"}] == [
        "fence_raised",
        "stale_rejected",
    ]


# The guard on the page about guards passes the suite.


PAGE = Path(__file__).parent.parent.parent / "docs" / "guards.md"
OWN = PAGE.read_text().partition("## A guard of your own")[2]
CODE = "".join(re.findall(r"^```python\n(.*?)^```", OWN, re.MULTILINE | re.DOTALL))
INI = "[pytest]\nasyncio_mode=auto\nasyncio_default_fixture_loop_scope=function\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_bucket.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--tb=short"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_guard_on_the_page_passes_its_suite(tmp_path: Path):
    done = run(tmp_path, CODE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 40
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protection", "without", "promise"),
    [
        ("admitted(resource, token, fence)", "check_token(token)", "test_a_lower_token_is_refused"),
        ("if self.objects.get(key, (None, 0))[1] != version:", "if False:", "test_no_update_is_lost"),
    ],
)
def test_without_one_of_its_protections_it_does_not(tmp_path: Path, protection: str, without: str, promise: str):
    assert protection in CODE
    done = run(tmp_path, "from fencing_sdk._values.token import check_token\n" + CODE.replace(protection, without))
    assert done.returncode == 1
    assert f"FAILED test_bucket.py::TestBucketGuard::{promise}" in done.stdout


# The one decision, in full, and SQLite's words for the same.


TOKENS = [Token(value, holder) for value in (0, 1, 2) for holder in (None, "a", "b")]
FENCES = [None, *TOKENS]


def values(token: Token | None) -> tuple[int, str | None] | None:
    return None if token is None else (int(token), token.holder)


def decided(token: Token, fence: Token | None) -> object:
    try:
        return values(admitted("r", token, fence))
    except StaleTokenError as error:
        return error.token, error.fence, error.conflict


def decided_by_sqlite(token: Token, fence: Token | None) -> object:
    guard = SqlGuard()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(guard.ddl())
        if fence is not None:
            connection.execute("INSERT INTO fencing_fence VALUES ('r', ?, ?)", values(fence))
        try:
            guard.admit_sync(connection, "r", token)
        except StaleTokenError as error:
            return error.token, error.fence, error.conflict
        return connection.execute("SELECT token, holder FROM fencing_fence WHERE resource = 'r'").fetchone()


@pytest.mark.parametrize(
    ("token", "fence", "outcome"),
    [
        (Token(1, "a"), None, (1, "a")),
        (Token(2, "b"), Token(1, "a"), (2, "b")),
        (2, Token(1, "a"), (2, None)),
        (Token(1, "a"), Token(1, "a"), (1, "a")),
        (Token(1, "a"), Token(1), (1, "a")),
        (Token(1), Token(1, "a"), (1, "a")),
        (Token(1), Token(1), (1, None)),
        (Token(1, "b"), Token(1, "a"), (1, 1, True)),
        (Token(0, "a"), Token(1, "a"), (0, 1, False)),
        (Token(0), Token(1, "a"), (0, 1, False)),
    ],
)
def test_the_table_in_the_docstring_is_what_happens(token, fence, outcome):
    assert decided(token if isinstance(token, Token) else Token(token), fence) == outcome


@pytest.mark.parametrize(
    ("token", "fence"), list(itertools.product(TOKENS, FENCES)), ids=lambda token: str(values(token))
)
def test_sqlite_decides_the_same(token, fence):
    assert decided_by_sqlite(token, fence) == decided(token, fence)


OVER_HTTP = {"etcd": EtcdGuard, "kahuna": KahunaGuard}
OF_BOTH = [
    (5, {}),
    ("redis://localhost", {}),
    ("{}://", {}),
    ("{}://localhost?prefix=a", {}),
    ("{}://localhost/path", {}),
    ("{}://user@localhost", {}),
    ("{}://localhost", {"prefix": ""}),
    ("{}://localhost", {"prefix": "a b"}),
    ("{}://localhost", {"ca": "no/such/file"}),
    ("{}+https://localhost", {"ca": "no/such/file"}),
    ("{}://localhost", {"observers": [None]}),
]


@pytest.mark.parametrize(
    ("scheme", "url", "options"),
    [
        *((scheme, *row) for scheme in OVER_HTTP for row in OF_BOTH),
        ("etcd", "etcd+https://localhost", {"key": "no/such/file"}),
    ],
)
def test_what_cannot_work_is_refused_when_built(scheme, url, options):
    with pytest.raises(ConfigurationError):
        OVER_HTTP[scheme](url.format(scheme) if isinstance(url, str) else url, **options)


@pytest.mark.parametrize(
    ("kind", "url", "option"),
    [
        (RedisGuard, "rediss://localhost:1?ssl_ca_certs={}", "ssl_ca_certs"),
        (RedisGuard, "rediss+cluster://localhost:1?ssl_ca_certs={}", "ssl_ca_certs"),
        (SqlGuard, "postgresql://localhost:1/app?sslmode=verify-full&sslrootcert={}", "sslrootcert"),
    ],
)
async def test_a_file_for_tls_that_cannot_be_used_is_named(kind, url, option, tmp_path):
    guard = kind(url.format(tmp_path / "none.pem"))
    with pytest.raises(ConfigurationError, match=f"{option} must .*'{tmp_path}/none.pem' cannot be read"):
        await guard.raise_to("a", 34)
