"""The bench of MariaDB and MySQL: a server that is up answers, one that was harmed shows it."""

from __future__ import annotations

import asyncmy
import pytest
from mysql_programs import flavours

pytest_plugins = ["mysql_fixtures"]


def test_kill_loses_what_was_not_flushed(start_mysql, tmp_path):
    """Or tests of durability would prove nothing."""
    forgetful = {"innodb_flush_log_at_trx_commit": 0, "innodb_flush_log_at_timeout": 2000}
    server = start_mysql(folder=tmp_path, **forgetful)
    server.ask("CREATE TABLE kept (n int PRIMARY KEY)")
    server.restart()
    for n in range(20):
        server.ask("INSERT INTO kept VALUES (%s)", n)
    server.kill()
    server.start()
    assert len(server.ask("SELECT n FROM kept")) < 20


def test_a_link_of_mariadb_is_not_taken_for_mysql(tmp_path, monkeypatch):
    (tmp_path / "mariadbd").touch(mode=0o755)
    (tmp_path / "mysqld").symlink_to("mariadbd")
    monkeypatch.setattr("mysql_programs.shutil.which", lambda name, path=None: str(tmp_path / name))
    monkeypatch.delenv("FENCING_TEST_MYSQL", raising=False)
    assert flavours() == ["mariadb"]
    monkeypatch.setenv("FENCING_TEST_MYSQL", str(tmp_path / "missing"))
    assert flavours() == ["mariadb", "mysql"], "its absence goes unnoticed"


# The network with faults


async def drain(connection, text):
    """The rows of each statement."""
    async with connection.cursor() as cursor:
        await cursor.execute(text)
        answers = [await cursor.fetchall()]
        while await cursor.nextset():
            answers.append(await cursor.fetchall())
        return answers


async def test_the_proxy_passes_on_and_sees_each_text(mysql_server, mysql_proxy):
    async with mysql_server.connected(port=mysql_proxy.port) as connection:
        seen = mysql_proxy.saw("'second'")
        text = "DO 0; SELECT 'second', n FROM (SELECT 1 AS n UNION SELECT 2) t; SELECT 3 FROM (SELECT 1) t WHERE false"
        assert [list(rows) for rows in await drain(connection, text)] == [[], [("second", 1), ("second", 2)], []]
        assert seen.done()
        (((long,),),) = await drain(connection, "SELECT REPEAT('x', 100000)")
        assert len(long) == 100_000
        assert mysql_proxy.requests[-1] == (b"COM_QUERY", b"SELECT REPEAT('x', 100000)")


@pytest.mark.parametrize(("fault", "applied"), [("lose_replies", 1), ("lose_requests", 0)])
async def test_a_reply_is_lost_after_the_text_was_executed(fault, applied, mysql_server, mysql_proxy):
    mysql_server.ask("CREATE TABLE done (n INT)")
    async with mysql_server.connected(port=mysql_proxy.port, autocommit=True) as connection:
        lost = getattr(mysql_proxy, fault)(of="INSERT INTO done")
        await connection.query("SELECT 7")
        with pytest.raises(asyncmy.errors.OperationalError):
            await connection.query("DO 0; INSERT INTO done VALUES (7); SELECT 1 FROM done")
        assert lost.done()
    assert mysql_server.ask("SELECT count(*) FROM done") == [(applied,)]


async def test_an_error_among_the_rows_ends_a_reply(mysql_server, mysql_proxy):
    async with mysql_server.connected(port=mysql_proxy.port) as connection:
        for statement in ("SELEC", "SELECT 1; SELEC", "SELECT 1 UNION SELECT (SELECT 1 UNION SELECT 2)"):
            with pytest.raises(asyncmy.errors.MySQLError):
                await drain(connection, statement)
        assert list((await drain(connection, "SELECT 4"))[0]) == [(4,)]
