"""`fencing init` creates what the store needs, once and before the first lock, or shows it."""

import asyncpg
import pytest
from command_line import Fencing

from fencing_sdk import connect

pytest_plugins = ["postgresql_fixtures"]


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
    statements, told = LACKS[missing]
    await postgresql_server.execute("CREATE ROLE app LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC;" + statements)
    done = fencing("init", "--url", postgresql_server.url_as("app"))
    assert done.returncode == 69
    assert told.format(database=postgresql_server.database) in done.stderr
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
