"""PostgreSQL answers, but not as one would like: credentials, permissions, limits."""

import asyncio
import logging
import re
from urllib.parse import quote

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
    nothing_left,
    role,
    sessions,
    terminate,
    waiting,
)
from serving import serving
from stays import LEAVING, LONG, PATIENCE, SHORT, Stay, opened, renewed_or_over, staying

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    Lost,
    RenewalFailed,
    Renewed,
    connect,
)
from fencing_sdk.backends.postgresql import from_url

pytest_plugins = ["postgresql_fixtures"]

WRONG = "hunter2"
SECRET = "s3cr:et@/%"


# Credentials.


@pytest.fixture
def guarded(start_postgresql):
    """A server that asks for passwords."""
    server = start_postgresql(hba=["host all all 127.0.0.1/32 scram-sha-256"], password_encryption="scram-sha-256")
    server.ask(f"CREATE ROLE app LOGIN PASSWORD '{SECRET}'")
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
    async with opened(guarded.url_as("app", SECRET)) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        guarded.ask("ALTER ROLE app PASSWORD 'changed'")
        await terminate(guarded)
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        with pytest.raises(BackendRefusedError) as caught:
            await locks.lock("b").acquire()
        shown = everything_shown_by(caught.value) + caplog.text + repr(locks) + repr(log.events)
        for secret in (SECRET, "s3cr", stay.lease.owner):
            assert secret not in shown


async def test_a_database_that_is_not_there_is_refused_at_once(postgresql_server):
    with pytest.raises(BackendRefusedError):
        async with asyncio.timeout(PATIENCE), opened(postgresql_server.url + "_not"):
            pytest.fail("it opened")


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
    place = f"{HOST}:{postgresql_server.port}"
    assert f"{place}: it, or a proxy before it, begins no TLS, which sslmode asks for; set ssl = on there" in said
    assert said.startswith("BackendRefusedError")
    findings = await from_url(f"{postgresql_server.url}?sslmode=require").diagnose(15.0)
    assert any("begins no TLS" in finding.what for finding in findings)


async def test_a_file_that_cannot_be_used_is_named_with_its_option(
    start_postgresql, postgresql_certificates, postgresql_server, tmp_path
):
    server = await asyncio.to_thread(start_postgresql, tls=postgresql_certificates)
    none, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("no certificate at all")
    for options, told in (
        ({"sslmode": "verify-full", "sslrootcert": none}, f"sslrootcert must .*'{none}' cannot be read"),
        ({"sslmode": "verify-full", "sslrootcert": text}, f"sslrootcert must .*'{text}' cannot be read as one"),
        ({"sslmode": "require", "sslcert": none, "sslkey": none}, f"sslcert must .*'{none}' cannot be read"),
        (
            {"sslmode": "require", "sslcert": postgresql_certificates.client_certificate, "sslkey": none},
            f"sslkey must .*'{none}' cannot be read",
        ),
        (
            {"sslmode": "verify-full", "sslrootcert": postgresql_certificates.client_certificate},
            f"{HOST}:{server.port}: the server's certificate is not trusted; name its authority with sslrootcert=",
        ),
    ):
        said = await complaint(server.url_as("postgres", **options))
        assert re.search(told, said), said
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
    ("handler", "told"),
    [
        (silent, "(no answer within 1 s: it hangs, or a server behind it, or it is not PostgreSQL)"),
        (polite, "(what answers there is not PostgreSQL)"),
        (curt, "; is it PostgreSQL?)"),
    ],
)
@pytest.mark.parametrize("mode", ["prefer", "require", "disable"])
async def test_another_service_is_told_with_its_host_and_port(handler, told, mode):
    async with serving(handler) as port:
        said = await complaint(f"postgresql://app:{WRONG}@{HOST}:{port}/app?sslmode={mode}&connect_timeout=1")
    assert f"no connection to {HOST}:{port} (" in said
    assert said.endswith(told)


POOLER_SAYS = {
    "wrong password": ("app", WRONG, "", {}, "wrong user or password"),
    "unknown user": ("nobody", WRONG, "", {}, "wrong user or password"),
    "unknown database": ("app", SECRET, "_not", {"server_login_retry": 0}, "the database does not exist"),
    "no connection left": ("app", SECRET, "", {"max_client_conn": 0}, "has no connection left"),
}


@pytest.mark.parametrize("case", POOLER_SAYS)
@pytest.mark.parametrize("kind", ["plain", "scram-sha-256"])
async def test_what_pgbouncer_refuses_is_told_as_postgresql_would(case, kind, postgresql_server):
    """It has one code for all of it, and doctor must not say that the server is to be started."""
    from postgresql_fixtures import require_program

    user, password, suffix, settings, told = POOLER_SAYS[case]
    bouncer = PgBouncer(postgresql_server, binary=require_program("pgbouncer"), auth_type=kind, **settings)
    users = bouncer.folder / "users"
    users.write_text(f'"app" "{SECRET}"\n')
    give(users)
    bouncer.settings["auth_file"] = str(users)
    with bouncer:
        url = bouncer.url.replace("postgres@", f"{user}:{quote(password, safe='')}@") + suffix
        said = await complaint(url)
        findings = {finding.check: finding for finding in (await connect(url).diagnose(over=0)).findings}
    assert f"{HOST}:{bouncer.port}: " in said
    assert said.endswith(f"{told} (08P01)")
    refused = case != "no connection left"
    assert said.startswith("BackendRefusedError") == refused
    assert findings["store.reachable"].mend.startswith("correct the URL, the login") == refused


# Permissions.


async def test_who_may_not_create_is_told_what_to_do(postgresql_server):
    await role(postgresql_server)
    await postgresql_server.execute(f"REVOKE ALL ON DATABASE {postgresql_server.database} FROM app")
    with pytest.raises(BackendRefusedError, match="fencing init"):
        async with opened(postgresql_server.url_as("app")) as (locks, _):
            await locks.lock("a").acquire()


async def test_without_create_a_database_without_the_schema_is_refused_with_a_way_out(postgresql_server):
    with pytest.raises(BackendRefusedError, match="fencing init"):
        async with opened(postgresql_server.url, create=False) as (locks, _):
            await locks.lock("a").acquire()
    assert await postgresql_server.value("SELECT to_regnamespace('fencing')") is None


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
        "SELECT ON fencing.fencing_lock",
        "INSERT ON fencing.fencing_lock",
        "UPDATE ON fencing.fencing_lock",
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


async def test_without_permission_to_call_it_is_refused_at_once(postgresql_server):
    await prepared(postgresql_server)
    await postgresql_server.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA fencing FROM PUBLIC")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BackendRefusedError):
            async with opened(postgresql_server.url_as("app")) as (locks, _):
                await locks.lock("a").acquire()
    await nothing_left(postgresql_server)


async def test_a_permission_that_is_taken_away_ends_the_body_in_time(postgresql_server):
    await prepared(postgresql_server)
    async with opened(postgresql_server.url_as("app")) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        await postgresql_server.execute("REVOKE UPDATE ON fencing.fencing_lock FROM app")
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        assert stay.left_at - stay.body_ended_at < LEAVING


# Limits.


@pytest.fixture
def kept_connections(monkeypatch):
    """On a machine that stands still, no connection is closed whose place another client could take."""
    monkeypatch.setattr("fencing_sdk.backends.postgresql.connection.request_queue.SILENCE", PATIENCE)


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
