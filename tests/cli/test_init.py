"""Before a store is used: its tables are made, a quorum is founded, and the doctor looks at it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
from collections.abc import Iterator
from typing import TYPE_CHECKING

import asyncpg
import pytest
from command_line import Fencing
from redis_quorum import Quorum
from redis_server import RedisServer

from fencing_sdk import connect
from fencing_sdk.errors import BackendRefusedError

if TYPE_CHECKING:
    pass

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


# `fencing init` creates what the store needs, once and before the first lock, or shows it.


async def tables(url: str) -> set[str]:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetch("SELECT tablename FROM pg_tables WHERE tablename LIKE 'fencing%'")
    finally:
        await connection.close()
    return {row["tablename"] for row in found}


async def usable(url: str) -> bool:
    async with connect(url, create=False) as locks, locks.lock("a") as lease:
        return lease.held


async def test_the_tables_are_created_and_a_second_time_changes_nothing(fencing: Fencing, postgresql_server):
    assert not await tables(postgresql_server.url)
    for _ in range(2):
        done = fencing("init", "--url", postgresql_server.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "fencing: the store is ready\n")
    assert await usable(postgresql_server.url)


async def test_on_mysql_the_tables_are_created_by_either_way(fencing: Fencing, mysql_server):
    done = await asyncio.to_thread(fencing, "init", "--sql", "--url", mysql_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert mysql_server.ask("SHOW TABLES") == []
    await mysql_server.execute(done.stdout)
    assert await usable(mysql_server.url)
    mysql_server.ask("DROP TABLE fencing_line, fencing_bell")
    for _ in range(2):
        done = await asyncio.to_thread(fencing, "init", "--url", mysql_server.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "fencing: the store is ready\n")
    assert await usable(mysql_server.url)


async def test_the_statements_are_printed_and_are_those_that_are_needed(fencing: Fencing, postgresql_server):
    done = fencing("init", "--sql", "--url", postgresql_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert not await tables(postgresql_server.url)
    connection = await asyncpg.connect(postgresql_server.url)
    try:
        await connection.execute(done.stdout)
    finally:
        await connection.close()
    assert await usable(postgresql_server.url)


def test_the_statements_need_no_server(fencing: Fencing):
    fencing.environment["FENCING_URL"] = "postgresql://user:secret@127.0.0.1:1/none"
    done = fencing("init", "--sql")
    assert done.returncode == 0
    assert "CREATE TABLE" in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_a_server_that_does_not_answer_is_told_without_its_password(fencing: Fencing):
    done = fencing("init", "--url", "postgresql://user:secret@127.0.0.1:1/none")
    assert done.returncode == 69
    assert done.stderr.startswith("fencing: nothing was created: ")
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


LACKS = {
    "the database": ("", "role 'app' lacks CREATE on database '{database}'"),
    "the schema": ("CREATE SCHEMA fencing; GRANT USAGE ON SCHEMA fencing TO app", "lacks CREATE on schema 'fencing'"),
    "what is there": (
        """
        CREATE SCHEMA fencing; GRANT ALL ON SCHEMA fencing TO app;
        CREATE FUNCTION fencing.fencing_check() RETURNS void LANGUAGE sql AS 'SELECT'
        """,
        "role 'app' does not own the tables or functions of schema 'fencing'",
    ),
}


@pytest.mark.parametrize("missing", LACKS)
async def test_a_role_that_may_not_create_is_told_which_right_it_lacks(fencing: Fencing, postgresql_server, missing):
    statements, heard = LACKS[missing]
    await postgresql_server.execute("CREATE ROLE app LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC;" + statements)
    done = fencing("init", "--url", postgresql_server.url_as("app"))
    assert done.returncode == 69
    assert heard.format(database=postgresql_server.database) in done.stderr
    assert "USAGE" not in done.stderr
    if "GRANT" in done.stderr:
        await postgresql_server.execute(done.stderr.partition(", or: ")[2])
        assert fencing("init", "--url", postgresql_server.url_as("app")).returncode == 0


@pytest.mark.parametrize("url", ["sqlite:///locks.db", "memory://", "redis://localhost"])
def test_a_store_without_tables_needs_nothing(fencing: Fencing, url: str):
    done = fencing("init", "--url", url)
    assert done.returncode == 0
    assert "nothing to do: " in done.stderr
    assert list(fencing.folder.glob("locks.db*")) == []


# `fencing init` founds a quorum of Redis servers once, and lets a node vote again that has lost its data.


@pytest.fixture
def quorum(redis_binary: str) -> Iterator[Quorum]:
    with Quorum(3, binary=redis_binary, appendonly=True) as made:
        yield made


async def token(url: str) -> int:
    async with connect(url) as locks, locks.lock("a") as lease:
        return lease.token


async def test_a_quorum_is_founded_once(fencing: Fencing, quorum: Quorum):
    with pytest.raises(BackendRefusedError, match="fencing init"):
        await token(quorum.url)
    for said in ("the quorum of 3 nodes is founded", "nothing to do: all 3 nodes remember the epoch"):
        done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", f"fencing: {said}\n")
    assert await token(quorum.url) < await token(quorum.url)


async def test_a_node_that_has_lost_its_data_is_admitted_again(fencing: Fencing, quorum: Quorum):
    await quorum.init()
    before = await token(quorum.url)
    quorum.nodes[1].ask("FLUSHALL")
    done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
    assert (done.returncode, done.stderr) == (0, "fencing: 1 of 3 nodes had lost their memory, and vote again\n")
    quorum.nodes[0].kill()
    assert await token(quorum.url) > before


async def test_nothing_is_founded_while_a_node_is_away(fencing: Fencing, quorum: Quorum):
    quorum.nodes[2].kill()
    done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
    assert done.returncode == 69
    assert done.stderr.startswith("fencing: nothing was founded: ")
    assert str(quorum.nodes[2].port) in done.stderr


# `fencing doctor`, as a person uses it: what it prints, its exit codes, and its JSON.


BUSY = ("machine.", "store.latency")


def quiet(text: str) -> bool:
    """Whether the machine was not too busy for its own measurements."""
    return not any(check in text for check in BUSY)


@pytest.fixture
def url(fencing: Fencing) -> str:
    return f"sqlite:///{fencing.folder}/locks.db?synchronous=normal&tokens=counter"


def test_findings_are_printed_on_80_columns_without_colours(fencing: Fencing, url: str):
    done = fencing("doctor", "--for", "300ms", "--url", url)
    assert done.stderr == ""
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    for line in ("longest pause", "sqlite.synchronous", "> leave synchronous out", "1 error", "heartbeat_interval"):
        assert line in done.stdout


def test_an_error_has_exit_code_1_and_a_warning_3(fencing: Fencing, tmp_path):
    down = fencing("doctor", "--for", "0", "--url", "redis://:hunter2@127.0.0.1:1")
    assert (down.returncode, down.stderr) == (1, "")
    assert "store.reachable" in down.stdout
    assert "Traceback" not in down.stdout
    assert "hunter2" not in down.stdout
    assert "no renewal was measured" in down.stdout
    assert "slowest renewal" not in down.stdout
    warned = fencing("doctor", "--for", "100ms", "--url", "memory://?tokens=counter")
    assert warned.returncode == 3 or not quiet(warned.stdout)
    assert "memory.tokens" in warned.stdout


def test_without_a_url_the_store_is_the_one_in_which_run_and_ls_keep_locks(fencing: Fencing):
    fencing("run", "nightly/1", "--", "true")
    done = fencing("doctor", "--for", "100ms")
    assert done.stderr == ""
    assert done.returncode == 0 or not quiet(done.stdout)
    assert "sqlite://" in done.stdout


def test_json_has_everything(fencing: Fencing, url: str):
    fencing.environment["FENCING_URL"] = url
    heard = json.loads(fencing("doctor", "--for", "200ms", "--json").stdout)
    assert heard.keys() == {"findings", "advice"}
    (finding,) = [finding for finding in heard["findings"] if quiet(finding["check"])]
    assert (finding["check"], finding["severity"]) == ("sqlite.synchronous", "error")
    assert finding.keys() == {"check", "severity", "what", "reason", "fix"}
    assert heard["advice"]["ttl"] >= 15


def test_a_terminal_gets_colours(fencing: Fencing, url: str):
    ours, theirs = pty.openpty()
    del fencing.environment["NO_COLOR"]
    fencing.environment |= {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = fencing.start("doctor", "--for", "100ms", "--url", url, stdout=theirs)
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 65536):
            printed += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait()
    assert b"\x1b[" in printed
    assert b"sqlite.synchronous" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "memory://", "--for", "1 fortnight"), "--for"),
        (("--url", "memory://", "--ttl", "1ms"), "ttl"),
        (("--url", "nonsense"), "url must look like"),
    ],
)
def test_wrong_usage_is_told(fencing: Fencing, arguments: tuple[str, ...], message: str):
    done = fencing("doctor", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("store", ["postgresql_server", "etcd_server", "zookeeper_server", "kahuna_server"])
def test_every_store_is_diagnosed(fencing: Fencing, request: pytest.FixtureRequest, store: str):
    check_diagnosis(fencing, request.getfixturevalue(store).url)


def test_redis_is_diagnosed(fencing: Fencing, redis_server: RedisServer):
    assert "redis.persistence" in check_diagnosis(fencing, redis_server.url)


def test_mysql_is_diagnosed(fencing: Fencing, mysql_server):
    check_diagnosis(fencing, mysql_server.url)


def check_diagnosis(fencing: Fencing, url: str) -> str:
    done = fencing("doctor", "--for", "200ms", "--url", url)
    assert done.stderr == ""
    assert done.returncode in {0, 1, 3}
    assert "store.reachable" not in done.stdout
    assert "self-test" not in done.stdout
    assert "slowest renewal" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    return done.stdout


def test_a_store_that_hangs_is_told(fencing: Fencing, redis_server: RedisServer):
    redis_server.pause()
    try:
        done = fencing("doctor", "--for", "1s", "--url", redis_server.url)
    finally:
        redis_server.resume()
    assert (done.returncode, done.stderr) == (1, "")
    assert "store.reachable" in done.stdout
