"""What MySQL and MariaDB refuse, and what is no MySQL: the error names what to mend, and shows no secret."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import asyncmy.errors
import pytest
from local_ports import HOST, free_port
from mysql_server import MysqlServer
from mysql_stage import NEEDED, SEVERAL, nothing_left, sessions, user
from postgresql_stage import everything_shown_by
from serving import serving
from stays import LEAVING, PATIENCE, SHORT, opened, renewed_or_over, staying

from fencing_sdk import BackendRefusedError, BackendUnavailableError, LockHeldError, connect
from fencing_sdk.abc import Claim, Gone, Place
from fencing_sdk.backends.mysql import MysqlBackend, errors, from_url
from fencing_sdk.backends.mysql.connection import MysqlSession
from fencing_sdk.errors import BackendError, ConfigurationError, UsageError

pytest_plugins = ["mysql_fixtures"]

PASSWORD = "s3cr:et@/%äß"
WRONG = "hunter2"


def by_socket(server: MysqlServer, name: str, password: str, suffix: str = "") -> str:
    """MySQL takes a password through the Unix socket without TLS and without one more package."""
    login = f"{quote(name, safe='')}:{quote(password, safe='')}"
    return f"mysql://{login}@/{server.database}{suffix}?unix_socket={quote(server.socket, safe='')}"


async def complaint(url: str, **options: Any) -> BackendError:
    """What a user reads whose client does not get a lock."""
    with pytest.raises((BackendRefusedError, BackendUnavailableError)) as caught:
        async with asyncio.timeout(PATIENCE), connect(url, **options) as locks:
            await locks.lock("a", wait=0).acquire()
            pytest.fail("it was granted")
    shown = everything_shown_by(caught.value)
    for secret in (WRONG, PASSWORD, "s3cr"):
        assert secret not in shown
    return caught.value


def refused(error: BackendError) -> bool:
    return isinstance(error, BackendRefusedError)


# Who logs in, and to what.


LOGINS = {
    "the right password": ("peter", PASSWORD, "", None),
    "wrong password": ("peter", WRONG, "", "wrong user or password"),
    "no password": ("peter", "", "", "wrong user or password"),
    "unknown user": ("nobody", WRONG, "", "wrong user or password"),
    "missing database": ("mary", PASSWORD, "_not", "the server says: Unknown database"),
    "no right to the database": ("paul", PASSWORD, "", "or the user has no right to use it (1044)"),
    "missing, without a right to it": ("peter", PASSWORD, "_not", "the database does not exist, or"),
}


@pytest.mark.parametrize("case", LOGINS)
async def test_a_login_is_refused_at_once_and_shown_nowhere(case, mysql_server, caplog):
    caplog.set_level(logging.DEBUG)
    name, password, suffix, said = LOGINS[case]
    user(mysql_server, password=PASSWORD, rights="ALL PRIVILEGES")
    user(mysql_server, name="mary", password=PASSWORD, rights="ALL PRIVILEGES", on="*")
    user(mysql_server, name="paul", password=PASSWORD, rights="")
    url = by_socket(mysql_server, name, password, suffix)
    if said is None:
        async with opened(url) as (locks, _), locks.lock("a"):
            pass
    else:
        error = await complaint(url)
        assert refused(error)
        assert said in str(error)
        assert await sessions(mysql_server) == []
    assert not [secret for secret in (WRONG, PASSWORD, "s3cr") if secret in caplog.text]


ACCOUNTS = {
    "PASSWORD EXPIRE": "the server says: You",
    "ACCOUNT LOCK": "locked",
    "REQUIRE SSL": "or one that has to use TLS, which ?tls=true does",
    "WITH MAX_QUERIES_PER_HOUR 3": "max_que",  # MySQL calls it max_questions
}


@pytest.mark.parametrize("change", ACCOUNTS)
async def test_an_account_that_does_not_let_its_user_in_is_named(change, mysql_server):
    url = user(mysql_server)
    mysql_server.ask(f"ALTER USER peter@'{HOST}' {change}")
    error = await complaint(url)
    assert ACCOUNTS[change] in str(error)
    assert refused(error) is not change.startswith("WITH")


async def test_a_password_that_changes_ends_the_body_in_time_and_is_shown_nowhere(mysql_server, caplog):
    caplog.set_level(logging.DEBUG)
    user(mysql_server, password=PASSWORD, rights="ALL PRIVILEGES")
    async with (
        opened(by_socket(mysql_server, "peter", PASSWORD)) as (locks, log),
        staying(locks.lock("a", **SHORT)) as stay,
    ):
        await renewed_or_over(log, stay)
        mysql_server.ask("ALTER USER peter@'localhost' IDENTIFIED BY 'changed'")
        mysql_server.end_connections()
        await stay.over()
        assert stay.lost is not None
        with pytest.raises(BackendRefusedError) as caught:
            await locks.lock("b").acquire()
        shown = everything_shown_by(caught.value) + caplog.text + repr(locks) + repr(log.events)
        for secret in (PASSWORD, "s3cr", stay.lease.owner):
            assert secret not in shown


@pytest.mark.parametrize(
    "url",
    [
        "mysql://{}",
        "mysql:{}",
        "mysql://u:{}@x@h/db",
        "mysql://u:{}/x@h/db",
        "mysql://u:{}#x@h/db",
        "mysql://{}:x@h:port/db",
        "mysql://u:{}@h:0/db",
        "mysql://u:{}@h:65536/db",
        "mysql://u:{}@h:1,/db",
        "mysql://u:{}@::1/db",
        "mysql://u:{}%FF@h/db",
        "mysql://u:{}@h",
        "mysql://u:{}@h/a/b",
        "mysql://u:{}@h/db?password=x",
        "mysql://u:{}@h/db?unix_socket=/run/mysqld.sock",
        "mysql://u:{}@/db?unix_socket=run/mysqld.sock",
        "mysql://u:{}@h/db?tls=perhaps",
        "mysql://u:{}@h/db?tokens=2",
        "mysql://u:{}@h/db?retention=3600",
        "mysql://u:{}@h/db?connect_timeout=0",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError) as caught:
        connect(url.replace("{}", WRONG))
    error: BaseException | None = caught.value
    while error is not None:
        assert WRONG not in f"{error} {error!r}"
        error = error.__context__


def test_no_password_in_the_repr_of_what_knows_it():
    backend = MysqlBackend(f"mysql://u:{WRONG}@h/db")
    store = backend._mysql
    shown = f"{backend!r} {store!r} {store.dialer!r} {store.dialer.hosts!r} {store.connection!r} {vars(backend)!r}"
    assert WRONG not in shown
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        pickle.dumps(backend)


async def test_a_login_that_needs_one_more_package_says_which(mysql_server, monkeypatch):
    """MySQL's usual login sends a password that is encrypted with the server's key, unless there is TLS or a socket."""
    monkeypatch.setattr("asyncmy.auth._have_cryptography", False)  # as it finds out when it is imported
    url = user(mysql_server, password=PASSWORD, rights="ALL PRIVILEGES")
    if mysql_server.flavour == "mariadb":
        async with opened(url) as (locks, _), locks.lock("a"):
            pass
    else:
        error = await complaint(url)
        assert refused(error)
        assert "this login without TLS needs the package cryptography; install it, or write ?tls=true" in str(error)


# Rights.


async def test_without_the_right_to_create_the_error_names_the_way_out(mysql_server):
    error = await complaint(user(mysql_server))
    assert refused(error)
    assert "the user may not create tables; run 'fencing init --url ...'" in str(error)


async def test_without_create_a_database_without_the_tables_is_refused_with_a_way_out(mysql_server):
    error = await complaint(mysql_server.url, create=False)
    assert refused(error)
    assert re.search(r"the database lacks fencing_bell, .*; run 'fencing init --url ...'", str(error))
    assert await mysql_server.fetch("SHOW TABLES") == []


async def prepared(server: Any, **options: Any) -> str:
    """Let one user create the tables, and another use them who may create nothing."""
    async with opened(server.url) as (locks, _), locks.lock("first"):
        pass
    return user(server, **options)


async def test_these_rights_are_enough(mysql_server):
    url = await prepared(mysql_server)
    async with opened(url) as (locks, _), opened(url) as (others, _):
        async with staying(locks.lock("a")) as stay, staying(locks.lock("b")) as other:
            assert await others.revoke("b", token=other.token, reason="because")
            with pytest.raises(LockHeldError):
                await others.lock("a", wait=0).acquire()
            await stay.end()
        async with others.lock("a", wait=PATIENCE):
            pass
    await nothing_left(mysql_server)


@pytest.mark.parametrize("missing", ["SELECT", "INSERT", "UPDATE"])
async def test_a_missing_right_is_refused_at_once_and_leaves_nothing(missing, mysql_server):
    url = await prepared(mysql_server, rights=", ".join({*NEEDED.split(", ")} - {missing}))
    error = await complaint(url)
    assert refused(error)
    assert "the user lacks a right: SELECT, INSERT, UPDATE and DELETE on the tables fencing_..." in str(error)
    await nothing_left(mysql_server)


async def test_a_right_that_is_taken_away_ends_the_body_in_time(mysql_server):
    url = await prepared(mysql_server)
    async with opened(url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        mysql_server.ask(f"REVOKE UPDATE ON {mysql_server.database}.* FROM peter@'{HOST}'")
        mysql_server.end_connections()  # the servers look at such a right when a session begins
        await stay.over()
        assert stay.lost is not None
        assert stay.left_at - stay.body_ended_at < LEAVING


# Servers that cannot keep a lock.


SETTINGS: dict[str, tuple[dict[str, Any], type[BackendError], str]] = {
    "forgets": ({"innodb_flush_log_at_trx_commit": 0}, BackendRefusedError, "innodb_flush_log_at_trx_commit is 0"),
    "statements": (
        {"skip_log_bin": False, "log_bin": "binlog", "server_id": 1, "binlog_format": "STATEMENT"},
        BackendRefusedError,
        "binlog_format is STATEMENT; set it to ROW or MIXED (1665)",
    ),
    "replica": ({"read_only": True}, BackendUnavailableError, "the server is read-only: read_only is on"),
    "broken": ({"init_connect": "DO oops"}, BackendUnavailableError, "init_connect"),
}


@pytest.mark.parametrize("case", SETTINGS)
async def test_a_server_that_cannot_keep_a_lock_is_refused(case, start_mysql):
    settings, kind, said = SETTINGS[case]
    server = await asyncio.to_thread(start_mysql, **settings)
    error = await complaint(server.url)
    assert type(error) is kind
    assert said in str(error)


async def test_a_server_that_may_be_one_of_several_that_take_writes_is_refused(mysql_flavour, start_mysql):
    """By its settings, without the others: a real group is more than these tests start."""
    settings, said = SEVERAL[mysql_flavour]
    server = await asyncio.to_thread(start_mysql, **settings)
    error = await complaint(server.url)
    assert refused(error)
    assert said in str(error)


# What is no MySQL.


@pytest.mark.parametrize(
    ("what", "text", "name"),
    [
        ("version", "8.0.11-TiDB-v8.5.0", "TiDB"),
        ("version", "8.0.30-Vitess", "Vitess"),
        ("version_comment", "PlanetScale", "PlanetScale"),
        ("version_comment", "OceanBase_CE 4.2.1.2", "OceanBase"),
    ],
)
async def test_a_database_that_only_speaks_the_protocol_is_refused_by_its_name(
    what, text, name, mysql_server, monkeypatch
):
    if what == "version":
        monkeypatch.setattr(MysqlSession, "version", text)
    else:
        monkeypatch.setattr("fencing_sdk.backends.mysql.connection.values_of", lambda _: {what: text.upper()})
    error = await complaint(mysql_server.url)
    assert refused(error)
    assert f"the server is {name}, and no MySQL" in str(error)


async def silent(reader, _writer):
    await reader.read(-1)


async def polite(_reader, writer):
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def chatty(reader, writer):
    writer.write(b"-ERR unknown command\r\n")
    await reader.read(-1)


async def curt(_reader, writer):
    writer.transport.abort()


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (silent, "(no answer within 1 s: it hangs, or it is not MySQL)"),
        (chatty, "(its answer cannot be read; is it MySQL?)"),
        (polite, "; is it MySQL?)"),
        (curt, "(it closed the connection; is it MySQL?)"),
    ],
)
@pytest.mark.parametrize("tls", ["true", "false"])
async def test_another_service_is_named_with_its_host_and_port(handler, said, tls):
    seconds = 1 if handler is silent else 20
    async with serving(handler) as port:
        error = await complaint(f"mysql://app:{WRONG}@{HOST}:{port}/app?tls={tls}&connect_timeout={seconds}")
    assert not refused(error)
    assert f"no connection to {HOST}:{port} (" in str(error)
    assert str(error).endswith(said)


async def test_a_server_that_is_away_is_named_with_its_host_and_port(tmp_path):
    port = free_port()
    assert str(await complaint(f"mysql://app:{WRONG}@{HOST}:{port}/app")).endswith(
        f"no connection to {HOST}:{port} (Connection refused)"
    )
    assert str(await complaint(f"mysql://app:{WRONG}@/app?unix_socket={tmp_path}/none")).endswith(
        "no connection to the Unix socket (No such file or directory)"
    )


# Texts.


def test_a_server_that_lacks_a_statement_is_too_old():
    """Such as SKIP LOCKED, which MariaDB has from 10.6 on, and MySQL from 8.0 on."""
    error = errors.translated("renew", asyncmy.errors.ProgrammingError(1064, "near 'SKIP LOCKED'"))
    assert refused(error)
    assert "it must be MySQL 8.0, MariaDB 10.6, or newer (1064)" in str(error)


async def test_tables_of_another_version_are_refused_and_named(mysql_server):
    url = mysql_server.url
    async with opened(url) as (locks, _), locks.lock("a"):
        pass
    mysql_server.ask("ALTER TABLE fencing_line DROP COLUMN others")
    error = await complaint(url)
    assert refused(error)
    assert "its tables named fencing_... are not those of this version" in str(error)


async def test_tables_that_are_dropped_while_a_client_is_open_are_created_again(mysql_server):
    async with opened(mysql_server.url) as (locks, _):
        async with locks.lock("a") as lease:
            before = lease.token
        mysql_server.ask("DROP TABLE fencing_line, fencing_ticket, fencing_bell")
        async with staying(locks.lock("a")) as stay:
            assert stay.token > before
            await stay.end()


async def test_a_mariadb_that_has_no_verbosity_of_notes_switches_them_off_in_the_older_way(mysql_server, monkeypatch):
    monkeypatch.setattr("fencing_sdk._mysql.driver._WITHOUT_NOTES_OF_MARIADB", "unknown_before_10_6_16 = ''")
    async with aclosing(from_url(mysql_server.url)) as backend:
        (answer,) = await backend._mysql.ask("SELECT @@sql_notes")
    assert [int(value) for (value,) in answer] == [0]


async def test_tables_that_another_client_creates_at_the_same_time_cost_no_line_in_the_log(
    mysql_server, caplog, monkeypatch
):
    """The servers note that a table exists, and the driver logs every note."""
    async with opened(mysql_server.url) as (locks, _), locks.lock("a"):
        pass
    monkeypatch.setattr("fencing_sdk.backends.mysql.connection._SHOW_TABLES", "SELECT 'other'")  # as one looked before
    async with opened(mysql_server.url) as (locks, _), locks.lock("a"):
        pass
    assert caplog.messages == []


# Names, labels and reasons.


NAMES = [
    "a",
    "A",
    "ä",
    "a ",
    "a  ",
    "é",
    "e\u0301",
    "ss",
    "ß",
    "x" * 511,
    "x" * 511 + " ",
    "\U0001d49c" * 128,
    "x'; --",
    "%s",
]


async def test_names_that_a_collation_takes_for_one_are_different_locks(mysql_server):
    async with aclosing(from_url(mysql_server.url)) as backend:
        places = [await backend.draw(Claim(name, 60.0)) for name in NAMES]
        assert None not in [place.token for place in places]
        assert await backend.names("", None, 100) == (sorted(NAMES, key=str.encode), None)
        assert await backend.names("a", None, 100) == (["a", "a ", "a  "], None)


TEXTS = ["", 'it\'s \\ "quoted" `so` %s %', "\0 \x1a \n", "äß€\U0001f512", "*/ x'00'", " "]


@pytest.mark.parametrize("text", TEXTS)
async def test_labels_and_reasons_come_back_as_they_were(text, mysql_server):
    async with aclosing(from_url(mysql_server.url)) as backend:
        held = Claim("a", 60.0, label=text)
        place = await backend.draw(held)
        await backend.draw(Claim("a", 60.0, label=text))
        assert [[seen.label for seen in line] for line in await backend.tickets(["a"])] == [[text, text]]
        await backend.end("a", place.token, text)
        assert await backend.keep([(held, place.number)]) == [Gone(text, taken=True)]


async def test_a_reason_with_a_lone_surrogate_is_refused_and_takes_nothing_away(mysql_server):
    async with aclosing(from_url(mysql_server.url)) as backend:
        held = Claim("a", 60.0)
        place = await backend.draw(held)
        with pytest.raises(BackendRefusedError, match="not valid Unicode"):
            await backend.end("a", place.token, "lone \ud800 surrogate")
        assert await backend.keep([(held, place.number)]) == [place]


async def test_a_text_that_is_too_long_for_a_packet_is_refused_and_nothing_else(start_mysql):
    server = await asyncio.to_thread(start_mysql, max_allowed_packet=1_048_576)
    async with aclosing(from_url(server.url)) as backend:
        with pytest.raises(BackendError):  # MariaDB may cut the connection before its answer is read
            await backend.draw(Claim("a", 60.0, label="x" * 1_000_000))
        assert await backend.tickets(["a"]) == [[]]
        assert isinstance(await backend.draw(Claim("a", 60.0, label="x" * 100_000)), Place)
        ((seen,),) = await backend.tickets(["a"])
        assert seen.label == "x" * 100_000
