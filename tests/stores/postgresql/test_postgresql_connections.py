"""From a URL to a connection: options, a PgBouncer between, and a server that answers, but not as one would like."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import asyncpg
import pytest
from event_log import CLOCK, ENDED_BY_TIME
from local_ports import HOST, free_port
from pgbouncer import PgBouncer
from postgresql_programs import give
from postgresql_server import PostgresqlServer
from postgresql_stage import (
    NEEDED,
    everything_shown_by,
    everything_works,
    line,
    nothing_left,
    role,
    sessions,
    terminate,
    waiting,
)
from serving import serving
from stays import LEAVING, LONG, PATIENCE, SHORT, Stay, opened, renewed_or_over, staying

from fencing_sdk import BackendRefusedError, BackendUnavailableError, connect
from fencing_sdk._values.url import read_postgresql_url
from fencing_sdk.abc import Claim
from fencing_sdk.backends.postgresql import PostgresqlBackend, from_url, schema_sql
from fencing_sdk.backends.postgresql.schema import newest_function, objects_sql
from fencing_sdk.diagnosis.checks import diagnosis_of
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.events import Lost, RenewalFailed, Renewed

pytest_plugins = ["postgresql_fixtures"]


# From a URL to the addresses of the servers; what cannot work is refused, and nothing of a URL is repeated.


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "hosts", "rest"),
    [
        ("postgresql://", [{}], {}),
        ("postgres://h/db", [{"host": ["h"]}], {"database": "db"}),
        ("postgresql://u:p@h:1", [{"host": ["h"], "port": [1]}], {"user": "u", "password": "p"}),
        (
            "postgresql://u:p@a:1,b,[::1]:3/db",
            [{"host": ["a"], "port": [1]}, {"host": ["b"]}, {"host": ["::1"], "port": [3]}],
            {"user": "u", "password": "p", "database": "db"},
        ),
        (
            "postgresql:///?host=a,::1&port=1,2&user=u&password=p&dbname=db",
            [{"host": ["a"], "port": [1]}, {"host": ["::1"], "port": [2]}],
            {"user": "u", "password": "p", "database": "db"},
        ),
        ("postgresql:///?host=a,b&port=1", [{"host": ["a"], "port": [1]}, {"host": ["b"], "port": [1]}], {}),
        ("postgresql://a,b:2/?port=1", [{"host": ["a"], "port": [1]}, {"host": ["b"], "port": [2]}], {}),
        ("postgresql:///db?host=/run/pg", [{"host": ["/run/pg"]}], {"database": "db"}),
        ("postgresql://%2Frun%2FPg/db", [{"host": ["/run/Pg"]}], {"database": "db"}),
        ("postgresql:///?port=1", [{"port": 1}], {}),
        ("postgresql://u@/a@b?host=%2Frun%2Fpg&user=v", [{"host": ["/run/pg"]}], {"user": "u", "database": "a@b"}),
    ],
)
def test_each_host_has_arguments_of_its_own(url, hosts, rest, monkeypatch):
    monkeypatch.delenv("PGPORT", raising=False)
    assert [host.arguments() for host in read_postgresql_url(url).each_host()] == [{**host, **rest} for host in hosts]


@pytest.mark.parametrize(
    "url",
    [
        "mysql://{}",
        "postgresql:{}",
        "postgresql://u:{}@x@h/db",
        "postgresql://u:{}/x@h/db",
        "postgresql://u:{}#x@h/db",
        "postgresql://{}:x@h:port/db",
        "postgresql://u:{}@h:0/db",
        "postgresql://u:{}@h:65536/db",
        "postgresql://u:{}@h:1,/db",
        "postgresql://u:{}@::1/db",
        "postgresql://u:{}@[::1/db",
        "postgresql://u:{}%00@h/db",
        "postgresql://u:{}%FF@h/db",
        "postgresql://u:p?{}@h/db",
        "postgresql://u:{}@h/db?sslmode",
        "postgresql://u:{}@h/db?ssl_mode=require",
        "postgresql://u:{}@h/db?sslmode=",
        "postgresql://u:{}@h/db?sslmode=a&sslmode=b",
        "postgresql:///db?host=a,b&port=1,2,3&password={}",
        "postgresql://u:{}@h/db?host=h2",
        "postgresql:///db?port=1,2&password={}",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError) as caught:
        from_url(url.replace("{}", SECRET))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__context__


@pytest.mark.parametrize("option", ["channel_binding", "keepalives_idle", "service"])
def test_an_option_of_libpq_that_the_driver_does_not_take_is_named(option):
    with pytest.raises(ConfigurationError, match=rf"option {option}\b.*, remove it"):
        from_url(f"postgresql://u:{SECRET}@h/db?sslmode=require&{option}=1")


def test_options_of_the_call_and_of_the_query_reach_the_driver_and_ours_do_not():
    backend = from_url("postgresql://h/db?schema=x&sslmode=require", application_name="a b", tokens="counter")
    (host,) = backend._dialer.hosts
    assert host.options == {"application_name": "a b", "sslmode": "require"}
    assert "application_name=a%20b" in str(host.options_dsn)
    assert backend.schema_sql() == schema_sql("x")


def test_no_password_in_the_repr_of_what_knows_it():
    backend = from_url(f"postgresql://u:{SECRET}@h/db")
    assert SECRET not in f"{backend!r} {backend._dialer!r} {backend._dialer.hosts!r} {backend._connection!r}"


def test_a_schema_is_quoted_wherever_it_stands():
    hostile = 'a"; DROP TABLE x; --$fencing$'
    written = 'a""; DROP TABLE x; --$fencing$'
    assert f'CREATE SCHEMA IF NOT EXISTS "{written}";' in schema_sql(hostile)
    assert ':"schema"' not in schema_sql(hostile).split("\n", 6)[-1]
    assert newest_function(hostile).startswith(f'"{written}".')


@pytest.mark.parametrize(("schema", "mark"), [("a$fencing$", "$fencing1$"), ("$fencing1$$fencing2$", "$fencing3$")])
def test_a_schema_cannot_end_the_body_of_a_function(schema, mark):
    parts = objects_sql(schema).split(mark)
    assert len(parts) > 25
    assert not [body for body in parts[1::2] if "FUNCTION" in body]
    assert not [rest for rest in parts[2::2] if not rest.startswith(";")]


# Behind a real PgBouncer in transaction mode: each statement may run on another connection, and LISTEN is useless.


POOLED = pytest.mark.parametrize("options", [{}, {"pooled": True}], ids=["as it comes", "pooled"])


@POOLED
async def test_everything_works_through_a_pooling_proxy(options, pgbouncer):
    await everything_works(pgbouncer.url, **options)


async def test_first_use_through_a_pooling_proxy_creates_the_schema_once(pgbouncer):
    async with contextlib.AsyncExitStack() as stack:

        async def first() -> int:
            locks, _ = await stack.enter_async_context(opened(pgbouncer.url, pooled=True))
            async with locks.lock("a", wait=PATIENCE) as lease:
                return lease.token

        tokens = await asyncio.gather(*(first() for _ in range(6)))
    assert len(set(tokens)) == 6


async def test_waiters_poll_and_get_their_turn_in_order(pgbouncer, postgresql_server):
    async with opened(pgbouncer.url, pooled=True) as (locks, _), opened(pgbouncer.url, pooled=True) as (others, _):
        async with staying(locks.lock("a", ttl=60)) as stay:
            waiters = []
            for number in range(4):
                waiters.append(Stay(others.lock("a", ttl=60), work=0))
                await waiting(postgresql_server, number + 1)
            begun = CLOCK.now()
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
            tokens = [waiter.token for waiter in waiters]
            assert tokens == sorted(tokens)
            assert CLOCK.now() - begun < 15
        assert await line(postgresql_server) == 0


@asynccontextmanager
async def in_transaction(pgbouncer: PgBouncer) -> AsyncIterator[None]:
    """Keep one of the connections behind the proxy busy."""
    application = await asyncpg.connect(pgbouncer.url, statement_cache_size=0)
    try:
        async with application.transaction():
            await application.execute("SELECT 1")
            yield
    finally:
        await application.close()


async def test_what_another_client_has_prepared_behind_the_proxy_is_never_run_instead(pgbouncer, postgresql_server):
    """Before the proxy is noticed: each of its two connections knows the first statement of another client."""
    direct, one, other = (PostgresqlBackend(url) for url in (postgresql_server.url, pgbouncer.url, pgbouncer.url))
    held = Claim("a", 60.0)
    await direct.draw(held)
    async with contextlib.AsyncExitStack() as second_is_busy:
        async with in_transaction(pgbouncer):
            await one.give_back(Claim("other", 60.0))  # prepared on the second connection
            await second_is_busy.enter_async_context(in_transaction(pgbouncer))
        await other.tickets(["other"])  # prepared on the first one
        assert not one._dialer.pooled, "the proxy was noticed earlier, and nothing is proved"
        await one.give_back(held)  # on the first one
    assert await direct.tickets(["a"]) == [[]]
    for backend in (one, other, direct):
        await backend.aclose()


async def test_connections_that_break_behind_the_proxy_cost_no_lease(pgbouncer, postgresql_server):
    async with opened(pgbouncer.url, pooled=True) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(3):
            renewed = len(log.of(Renewed))
            await terminate(postgresql_server)
            await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []


async def test_no_state_is_left_in_the_sessions_of_others(pgbouncer, postgresql_server, monkeypatch):
    """What a call sets for itself must not reach the application that gets the connection next."""
    queue = "fencing_sdk.backends._shared.request_queue"
    monkeypatch.setattr(f"{queue}.SILENCE", PATIENCE)  # the proxy would end the server's session, too
    settings = (
        "lock_timeout",
        "statement_timeout",
        "synchronous_commit",
        "search_path",
        "default_transaction_isolation",
    )
    names = "current_setting('" + "') || ' ' || current_setting('".join(settings) + "')"
    with PgBouncer(postgresql_server, binary=pgbouncer.binary, default_pool_size=1) as narrow:
        application = await asyncpg.connect(narrow.url, statement_cache_size=0)
        before = await application.fetchval(f"SELECT {names}")
        pid = await application.fetchval("SELECT pg_backend_pid()")
        async with opened(narrow.url, pooled=True) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            waiter = Stay(locks.lock("b", ttl=10), work=0)
            await log.seen(Renewed, 2)
            await waiter.over()
            await stay.end()
            assert await application.fetchval(f"SELECT {names}") == before
        assert await application.fetchval(f"SELECT {names}") == before
        assert await application.fetchval("SELECT pg_backend_pid()") == pid  # or the test would prove nothing
        assert await application.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
        assert await application.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        await application.close()


# PostgreSQL answers, but not as one would like: credentials, permissions, limits.


WRONG = "hunter2"
PASSWORD = "s3cr:et@/%"


# Credentials.


@pytest.fixture
def guarded(start_postgresql):
    """A server that asks for passwords."""
    server = start_postgresql(hba=["host all all 127.0.0.1/32 scram-sha-256"], password_encryption="scram-sha-256")
    server.ask(f"CREATE ROLE app LOGIN PASSWORD '{PASSWORD}'")
    server.ask("GRANT ALL ON DATABASE postgres TO app")
    return server


async def test_a_wrong_password_is_refused_at_once_and_shown_nowhere(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BackendRefusedError) as caught:
        async with asyncio.timeout(PATIENCE), opened(guarded.url_as("app", WRONG)):
            pytest.fail("it opened")
    assert WRONG not in everything_shown_by(caught.value) + caplog.text
    assert await sessions(guarded) == []


async def test_a_password_that_changes_ends_the_body_in_time_and_is_shown_nowhere(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    async with opened(guarded.url_as("app", PASSWORD)) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        guarded.ask("ALTER ROLE app PASSWORD 'changed'")
        await terminate(guarded)
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        with pytest.raises(BackendRefusedError) as caught:
            await locks.lock("b").acquire()
        shown = everything_shown_by(caught.value) + caplog.text + repr(locks) + repr(log.events)
        for secret in (PASSWORD, "s3cr", stay.lease.owner):
            assert secret not in shown


# Addresses and TLS.


async def complaint(url: str) -> str:
    """What is said to a user whose client does not open."""
    with pytest.raises((BackendRefusedError, BackendUnavailableError)) as caught:
        async with connect(url):
            pytest.fail("it opened")
    assert WRONG not in everything_shown_by(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


async def test_of_several_hosts_each_is_told_with_what_it_said(guarded):
    """One is down and the other wants another password: who only reads of the first looks in the wrong place."""
    down, up = f"127.0.0.1:{free_port()}", f"127.0.0.1:{guarded.port}"
    said = await complaint(f"postgresql://app:{WRONG}@{down},{up}/postgres")
    assert said == (
        "BackendUnavailableError: PostgresqlBackend: connect failed: "
        f"no connection to {down} (Connection refused); {up}: wrong user or password (28P01)"
    )
    said = await complaint(f"postgresql://app:{WRONG}@{up},localhost:{guarded.port}/postgres")
    assert said.startswith("BackendRefusedError: ")
    assert said.endswith(f"{up}, localhost:{guarded.port}: wrong user or password (28P01)")


@pytest.mark.parametrize("mode", ["verify-full", "verify-ca"])
async def test_a_certificate_is_not_verified_without_its_authority(mode, postgresql_server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    said = await complaint(f"{postgresql_server.url}?sslmode={mode}")
    assert f"sslmode={mode} needs the certificate of the authority; write sslrootcert=" in said
    assert said.startswith("BackendRefusedError")


async def test_a_server_without_tls_is_told_as_that(postgresql_server):
    said = await complaint(f"{postgresql_server.url}?sslmode=require")
    assert f"{HOST}:{postgresql_server.port} (it closed the connection, or has no TLS; is it PostgreSQL?)" in said
    findings = await diagnosis_of(from_url(f"{postgresql_server.url}?sslmode=require")).diagnose(15.0)
    assert any("has no TLS" in finding.what for finding in findings)


async def test_a_file_that_cannot_be_used_is_named_with_its_option(
    start_postgresql, postgresql_certificates, postgresql_server, tmp_path
):
    server = await asyncio.to_thread(start_postgresql, tls=postgresql_certificates)
    none, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("no certificate at all")
    for options, heard in (
        ({"sslmode": "verify-full", "sslrootcert": none}, f"sslrootcert must .*'{none}' cannot be read"),
        ({"sslmode": "verify-full", "sslrootcert": text}, f"sslrootcert must .*'{text}' cannot be read as one"),
        ({"sslmode": "require", "sslcert": none, "sslkey": none}, f"sslcert must .*'{none}' cannot be read"),
        (
            {"sslmode": "require", "sslcert": postgresql_certificates.client_certificate, "sslkey": none},
            f"sslcert must .*'{none}' cannot be read",
        ),
        (
            {"sslmode": "verify-full", "sslrootcert": postgresql_certificates.client_certificate},
            f"{HOST}:{server.port}: the server's certificate is not trusted; name its authority with sslrootcert=",
        ),
    ):
        said = await complaint(server.url_as("postgres", **options))
        assert re.search(heard, said), said
        assert said.startswith("BackendRefusedError")
    said = await complaint(f"postgresql:///app?host={tmp_path}")
    assert "(no server listens at that socket)" in said
    assert said.startswith("BackendUnavailableError")


async def silent(reader, _writer):
    await reader.read(-1)


async def polite(_reader, writer):
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def curt(_reader, writer):
    writer.transport.abort()


@pytest.mark.parametrize(
    ("handler", "heard"),
    [
        (silent, "(no answer within 1 s: it hangs, or a server behind it, or it is not PostgreSQL)"),
        (polite, "; is it PostgreSQL?)"),
        (curt, "; is it PostgreSQL?)"),
    ],
)
@pytest.mark.parametrize("mode", ["prefer", "require", "disable"])
async def test_another_service_is_told_with_its_host_and_port(handler, heard, mode):
    seconds = 1 if handler is silent else 20
    async with serving(handler) as port:
        said = await complaint(f"postgresql://app:{WRONG}@{HOST}:{port}/app?sslmode={mode}&connect_timeout={seconds}")
    assert f"no connection to {HOST}:{port} (" in said
    assert said.endswith(heard)


POOLER_SAYS = {
    "wrong password": ("app", WRONG, "", {}),
    "unknown user": ("nobody", WRONG, "", {}),
    "unknown database": ("app", PASSWORD, "_not", {"server_login_retry": 0}),
    "no connection left": ("app", PASSWORD, "", {"max_client_conn": 0}),
}


@pytest.mark.parametrize("case", POOLER_SAYS)
@pytest.mark.parametrize("kind", ["plain", "scram-sha-256"])
async def test_what_pgbouncer_refuses_is_shown_in_its_words(case, kind, postgresql_server):
    """Older ones have one code for all of it."""
    from postgresql_fixtures import require_program

    user, password, suffix, settings = POOLER_SAYS[case]
    bouncer = PgBouncer(postgresql_server, binary=require_program("pgbouncer"), auth_type=kind, **settings)
    users = bouncer.folder / "users"
    users.write_text(f'"app" "{PASSWORD}"\n')
    give(users)
    bouncer.settings["auth_file"] = str(users)
    with bouncer:
        url = bouncer.url.replace("postgres@", f"{user}:{quote(password, safe='')}@") + suffix
        said = await complaint(url)
    assert f"{HOST}:{bouncer.port}: the server says: " in said
    assert said.endswith(("(08P01)", "(3D000)")), said  # PgBouncer 1.25 has the code of the server


# Permissions.


async def test_who_may_not_create_is_told_what_to_do(postgresql_server):
    await role(postgresql_server)
    await postgresql_server.execute(f"REVOKE ALL ON DATABASE {postgresql_server.database} FROM app")
    with pytest.raises(BackendRefusedError, match="fencing init"):
        async with opened(postgresql_server.url_as("app")) as (locks, _):
            await locks.lock("a").acquire()


async def test_these_permissions_are_enough(postgresql_server):
    await prepared(postgresql_server)
    await everything_works(postgresql_server.url_as("app"))
    await nothing_left(postgresql_server)


async def prepared(server: PostgresqlServer) -> None:
    """Let the superuser create the schema, and a user use it who may create nothing."""
    async with opened(server.url) as (locks, _), locks.lock("first"):
        pass
    await role(server)
    await server.execute(f"REVOKE ALL ON DATABASE {server.database} FROM app; REVOKE ALL ON SCHEMA public FROM PUBLIC")
    await server.execute(NEEDED)


@pytest.mark.parametrize(
    "missing",
    [
        "SELECT ON fencing.fencing_line",
        "INSERT ON fencing.fencing_ticket",
        "UPDATE ON fencing.fencing_line",
        "USAGE ON SCHEMA fencing",
    ],
)
async def test_a_missing_permission_is_refused_at_once_and_leaves_nothing(missing, postgresql_server):
    await prepared(postgresql_server)
    await postgresql_server.execute(f"REVOKE {missing} FROM app")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BackendRefusedError):
            async with opened(postgresql_server.url_as("app")) as (locks, _):
                await locks.lock("a").acquire()
    await nothing_left(postgresql_server)


async def test_a_permission_that_is_taken_away_ends_the_body_in_time(postgresql_server):
    await prepared(postgresql_server)
    async with opened(postgresql_server.url_as("app")) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        await postgresql_server.execute("REVOKE UPDATE ON fencing.fencing_ticket FROM app")
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        assert stay.left_at - stay.body_ended_at < LEAVING


# Limits.


@pytest.fixture
def kept_connections(monkeypatch):
    """On a machine that stands still, no connection is closed whose place another client could take."""
    monkeypatch.setattr("fencing_sdk.backends._shared.request_queue.SILENCE", PATIENCE)


async def test_a_connection_limit_that_is_reached_is_waited_for(postgresql_server, kept_connections):
    url = await role(postgresql_server, options="CONNECTION LIMIT 1")
    async with opened(url) as (locks, _):
        async with staying(locks.lock("a", **LONG)) as stay:
            with pytest.raises(BackendUnavailableError):
                async with opened(url):
                    pytest.fail("it opened")
            await stay.end()
    await nothing_left(postgresql_server)
    async with opened(url) as (locks, _), locks.lock("a"):
        pass
    await nothing_left(postgresql_server)


async def test_a_client_that_lost_its_connection_at_the_limit_comes_back(postgresql_server):
    url = await role(postgresql_server, options="CONNECTION LIMIT 1")
    async with opened(url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=0.3)) as stay:
        await log.seen(Renewed)
        await postgresql_server.execute("ALTER ROLE app CONNECTION LIMIT 0")
        await terminate(postgresql_server)
        await log.seen(RenewalFailed, 2)
        await postgresql_server.execute("ALTER ROLE app CONNECTION LIMIT 1")
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_waiters_get_their_turn_without_a_connection_to_listen_on(postgresql_server, kept_connections):
    url = await role(postgresql_server, options="CONNECTION LIMIT 2")
    async with opened(url) as (locks, log), opened(url) as (others, _):
        async with staying(locks.lock("a", **LONG)) as stay:
            waiters = [Stay(others.lock("a", ttl=20, wait=PATIENCE), work=0) for _ in range(3)]
            await waiting(postgresql_server, 3)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 3)
            begun = CLOCK.now()
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
            assert CLOCK.now() - begun < 10
        assert log.of(Lost) == []
    await nothing_left(postgresql_server)
