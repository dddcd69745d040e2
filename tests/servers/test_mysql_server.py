"""The bench of MariaDB and MySQL: a server that is up answers, one that was harmed shows it."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import asyncmy
import pymysql
import pytest
from child_processes import state
from local_ports import HOST, free_port
from mysql_programs import flavours, template
from mysql_server import USER, MysqlServer

pytest_plugins = ["mysql_fixtures"]


async def ping(server: MysqlServer, **options) -> int:
    """An answer, or TimeoutError after a second."""

    async def answer() -> int:
        async with server.connected(**options) as connection, connection.cursor() as cursor:
            await cursor.execute("SELECT 1")
            return (await cursor.fetchone())[0]

    asking = asyncio.create_task(answer())
    done, _ = await asyncio.wait((asking,), timeout=options.get("read_timeout", 20))
    if not done:
        asking.cancel()
        await asyncio.wait((asking,))
        raise TimeoutError
    return asking.result()


async def test_the_shared_server_answers_and_its_database_is_empty(mysql_server):
    assert await ping(mysql_server) == 1
    assert mysql_server.ask("SHOW TABLES") == []
    assert mysql_server.ask("SELECT user FROM mysql.user WHERE user IN (%s, '')", "left") == []
    await mysql_server.execute("CREATE TABLE behind (n int); CREATE USER 'left'@'%'; INSERT INTO behind VALUES (1)")
    held = await asyncmy.connect(host=HOST, port=mysql_server.port, user=USER, database=mysql_server.database)
    await held.begin()
    await held.query("SELECT * FROM behind FOR UPDATE")
    assert await mysql_server.value("SELECT count(*) FROM behind") == 1
    mysql_server.pause()
    held.close()


test_what_a_test_leaves_behind_is_gone = test_the_shared_server_answers_and_its_database_is_empty


def test_the_server_is_the_one_whose_name_the_test_has(mysql_server, mysql_flavour):
    ((version,),) = mysql_server.ask("SELECT @@version")
    assert ("MariaDB" in version) == (mysql_flavour == "mariadb")
    assert mysql_server.ask("SELECT @@innodb_flush_log_at_trx_commit") == [(1,)]


async def test_settings_reach_the_server(start_mysql):
    server = start_mysql(max_connections=11, low_priority_updates=True, init_connect="SET @a = 'it''s'")
    assert server.ask("SELECT @@max_connections, @@low_priority_updates") == [(11, 1)]
    async with server.connected() as connection, connection.cursor() as cursor:
        await cursor.execute("SELECT @a")
        assert await cursor.fetchall() == (("it's",),)


async def test_the_user_of_the_tests_may_do_everything_in_their_databases_alone(mysql_server):
    async with mysql_server.connected() as connection, connection.cursor() as cursor:
        await cursor.execute("CREATE TABLE t (n int)")
        await cursor.execute("DROP TABLE t")
        with pytest.raises(asyncmy.errors.OperationalError, match="denied"):
            await cursor.execute("CREATE DATABASE other")


async def test_passwords_are_asked_for_and_the_bench_needs_none(mysql_server):
    mysql_server.ask("CREATE USER asked@'127.0.0.1' IDENTIFIED BY 'se:cr@et'")
    mysql_server.ask(f"GRANT ALL ON {mysql_server.database}.* TO asked@'127.0.0.1'")
    assert await ping(mysql_server, user="asked", password="se:cr@et") == 1
    with pytest.raises(asyncmy.errors.OperationalError, match="denied"):
        await ping(mysql_server, user="asked", password="wrong")


async def test_tls_with_a_certificate_of_the_authority(start_mysql, mysql_certificates):
    server = start_mysql(tls=mysql_certificates, require_secure_transport=True)
    context = ssl.create_default_context(cafile=str(mysql_certificates.authority))
    assert await ping(server, ssl=context) == 1
    with pytest.raises(asyncmy.errors.OperationalError, match=r"insecure transport|denied"):
        await ping(server)


async def test_a_restart_keeps_the_port_and_what_was_committed(start_mysql):
    server = start_mysql()
    port, pid = server.port, server.pid
    server.ask("CREATE TABLE kept AS SELECT 1 AS n")
    server.restart()
    assert (server.port, server.ask("SELECT n FROM kept")) == (port, [(1,)])
    server.ask("UPDATE kept SET n = 2")
    server.kill()
    assert not server.running
    with pytest.raises(asyncmy.errors.OperationalError):
        await ping(server)
    server.start()
    assert (server.port, server.ask("SELECT n FROM kept")) == (port, [(2,)])
    assert server.pid != pid


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


async def test_a_paused_server_takes_connections_and_does_not_answer(mysql_server):
    async with mysql_server.connected() as connection:
        mysql_server.pause()
        with pytest.raises(TimeoutError):
            await ping(mysql_server, read_timeout=0.3)
        asking = asyncio.create_task(connection.query("SELECT 2"))
        await asyncio.wait((asking,), timeout=0.3)
        assert not asking.done()
        mysql_server.resume()
        await asking


def test_two_servers_never_share_a_port(start_mysql, monkeypatch):
    first = start_mysql()
    ports = [first.port]
    monkeypatch.setattr("mysql_server.free_port", lambda: ports.pop() if ports else free_port())
    second = start_mysql()
    assert second.port != first.port
    assert second.ask("SELECT 1") == [(1,)]


def test_ended_connections_hear_of_it(mysql_server):
    connection = pymysql.connect(host=HOST, port=mysql_server.port, user=USER, database=mysql_server.database)
    mysql_server.end_connections()
    with pytest.raises(pymysql.OperationalError):
        connection.query("SELECT 1")
    connection.close()


DYING = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from mysql_server import MysqlServer
server = MysqlServer({flavour!r}).start()
print(server.pid, server.folder, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["sys.exit()", "raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["exit", "interrupt", "kill"],
)
def test_no_server_outlives_the_tests(mysql_server, end):
    script = DYING.format(folder=str(Path(__file__).parent), flavour=mysql_server.flavour, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    pid, folder = done.stdout.split()
    limit = time.monotonic() + 20
    while state(int(pid)) not in {"", "Z"} and time.monotonic() < limit:
        time.sleep(0.01)
    assert state(int(pid)) in {"", "Z"}
    shutil.rmtree(folder, ignore_errors=True)
    assert template(mysql_server.flavour).exists(), "the other process took what this one uses"


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


async def test_tls_goes_through_the_proxy_unseen(start_mysql, mysql_certificates):
    from mysql_proxy import MysqlProxy

    server = start_mysql(tls=mysql_certificates)
    async with MysqlProxy(server) as proxy:
        context = ssl.create_default_context(cafile=str(mysql_certificates.authority))
        assert await ping(server, port=proxy.port, host="localhost", ssl=context) == 1
        assert proxy.requests == []
