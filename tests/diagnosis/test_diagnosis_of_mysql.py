"""MySQL and MariaDB: each misconfiguration is planted on a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, WARNING, found
from local_ports import HOST
from mysql_server import MysqlServer

if TYPE_CHECKING:
    from mysql_fixtures import StartMysql

pytest_plugins = ["mysql_fixtures"]

UNLOGGED = {"innodb_flush_log_at_trx_commit": 1, "skip_log_bin": True}


async def test_nothing_is_found_on_a_sound_server(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, **UNLOGGED)
    assert await found(server.url) == {}
    assert await server.value("SELECT count(*) FROM fencing_line WHERE dies > 0") == 0
    assert await server.value("SELECT count(*) FROM fencing_ticket") == 0


@pytest.mark.parametrize(
    ("setting", "check", "severity"),
    [
        ("innodb_flush_log_at_trx_commit = 0", "store.reachable", ERROR),
        ("innodb_flush_log_at_trx_commit = 2", "mysql.flush", WARNING),
        ("read_only = 1", "store.reachable", ERROR),
    ],
)
async def test_a_setting_that_breaks_a_promise_is_found(start_mysql: StartMysql, setting: str, check: str, severity):
    server = await asyncio.to_thread(start_mysql, **UNLOGGED)
    await server.execute(f"SET GLOBAL {setting}")
    findings = await found(server.url)
    assert findings[check].severity == severity
    assert all(finding.reason and finding.fix for finding in findings.values())


async def test_a_log_for_replicas_that_may_miss_grants_is_found(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, log_bin="log", server_id=1, sync_binlog=0)
    findings = await found(server.url, tokens="counter")
    assert {check: finding.severity for check, finding in findings.items()} == {
        "mysql.sync-binlog": WARNING,
        "mysql.counter": WARNING,
    }


async def test_two_hosts_that_take_writes_are_found(start_mysql: StartMysql):
    one, two = [await asyncio.to_thread(start_mysql) for _ in range(2)]
    findings = await found(one.url.replace(f":{one.port}/", f":{one.port},{HOST}:{two.port}/"))
    assert findings["mysql.writers"].severity == ERROR
    assert "do not exclude each other" in findings["mysql.writers"].reason


async def test_a_user_with_one_connection_has_its_settings_read_and_cannot_hand_on(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, **UNLOGGED | {"innodb_flush_log_at_trx_commit": 2})
    await server.execute("CREATE USER alone WITH MAX_USER_CONNECTIONS 1")
    await server.execute("GRANT ALL ON *.* TO alone")
    findings = await found(server.url_as("alone"))
    assert set(findings) == {"mysql.flush", "self-test.open a second connection"}


async def test_a_reader_is_not_one_of_two_that_take_writes(start_mysql: StartMysql):
    """A reader of Aurora, where no user may set ``read_only``."""
    writer, reader = [await asyncio.to_thread(start_mysql) for _ in range(2)]
    await asyncio.to_thread(reader.restart_as_reader)
    url = writer.url.replace(f":{writer.port}/", f":{writer.port},{HOST}:{reader.port}/")
    assert "mysql.writers" not in await found(url)


async def test_a_login_that_is_refused_is_found_without_its_password(mysql_server: MysqlServer):
    findings = await found(mysql_server.url_as("app", "hunter2"))
    assert findings["mysql.host"].severity == ERROR
    assert "hunter2" not in repr(findings)


async def test_a_server_that_is_down_or_hangs_is_found_in_bounded_time(mysql_server: MysqlServer):
    await asyncio.to_thread(mysql_server.pause)
    async with asyncio.timeout(60):
        findings = await found(mysql_server.url)
    assert {"store.reachable", "mysql.host"} == set(findings)
    await asyncio.to_thread(mysql_server.resume)
    findings = await found(mysql_server.url.replace(f":{mysql_server.port}/", f":1,{HOST}:{mysql_server.port}/"))
    assert findings["mysql.host"].severity == WARNING
