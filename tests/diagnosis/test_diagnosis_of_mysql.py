"""MySQL and MariaDB: every misconfiguration is planted on a real server, and found by the name of its check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pymysql
import pytest
from diagnosing import ERROR, NOTE, WARNING, by_check, diagnosed, found
from local_ports import HOST
from mysql_server import USER, MysqlServer

from fencing_sdk.diagnosis.checks import judged
from fencing_sdk.diagnosis.mysql import CHECKS, MysqlFacts

if TYPE_CHECKING:
    from mysql_fixtures import StartMysql

pytest_plugins = ["mysql_fixtures"]

UNLOGGED = {"innodb_flush_log_at_trx_commit": 1, "skip_log_bin": True}


async def test_nothing_is_found_on_a_sound_server(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, **UNLOGGED)
    diagnosis = await diagnosed(server.url)
    assert by_check(diagnosis) == {}
    assert abs(diagnosis.measurements.clock_difference) < 1
    assert diagnosis.measurements.handed_on is not None
    assert await server.value("SELECT count(*) FROM fencing_lock WHERE grants <> '[]'") == 0
    assert await server.value("SELECT count(*) FROM fencing_waiter") == 0


PLANTED = {
    "a crash forgets": ("innodb_flush_log_at_trx_commit = 0", "mysql.flush", ERROR),
    "a power failure forgets": ("innodb_flush_log_at_trx_commit = 2", "mysql.flush", WARNING),
    "read-only": ("read_only = 1", "mysql.read-only", ERROR),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_setting_that_breaks_a_promise_is_found(start_mysql: StartMysql, planted: str):
    setting, check, severity = PLANTED[planted]
    server = await asyncio.to_thread(start_mysql, **UNLOGGED)
    await server.execute(f"SET GLOBAL {setting}")
    findings = await found(server.url)
    assert findings[check].severity == severity
    assert set(findings) <= {check, "store.reachable"}
    assert all(finding.reason and finding.fix for finding in findings.values())


async def test_a_log_for_replicas_that_may_miss_grants_is_found(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, log_bin="log", server_id=1, sync_binlog=0)
    findings = await found(server.url, tokens="counter")
    assert {check: finding.severity for check, finding in findings.items()} == {
        "mysql.sync-binlog": WARNING,
        "mysql.counter": WARNING,
    }
    await server.execute("SET GLOBAL sync_binlog = 1; SET GLOBAL binlog_format = 'STATEMENT'")
    assert (await found(server.url))["mysql.binlog-format"].severity == ERROR


async def test_a_server_with_few_connections_left_is_found(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql, max_connections=20)
    held = [pymysql.connect(host=HOST, port=server.port, user=USER) for _ in range(17)]
    try:
        assert (await found(server.url))["mysql.connections"].severity == WARNING
    finally:
        for connection in held:
            connection.close()


async def test_a_user_without_a_name_is_found(start_mysql: StartMysql):
    server = await asyncio.to_thread(start_mysql)
    await server.execute(f"CREATE USER ''@'localhost'; GRANT SELECT ON mysql.user TO '{USER}'@'{HOST}'")
    assert (await found(server.url))["mysql.anonymous"].severity == WARNING


async def test_two_hosts_that_take_writes_are_found(start_mysql: StartMysql):
    one, two = [await asyncio.to_thread(start_mysql) for _ in range(2)]
    findings = await found(one.url.replace(f":{one.port}/", f":{one.port},{HOST}:{two.port}/"))
    assert findings["mysql.writers"].severity == ERROR
    assert "do not exclude each other" in findings["mysql.writers"].reason


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


SOUND = {"threads_connected": "1", "max_connections": "151"}


@pytest.mark.parametrize(
    ("values", "check"),
    [
        ({"version": "10.5.22-MariaDB"}, "mysql.version"),
        ({"version": "5.7.44"}, "mysql.version"),
        ({"version": "10.11.6-MariaDB", "wsrep_on": "ON"}, "mysql.writers"),
        ({"version": "8.4.3", "group_replication_single_primary_mode": "OFF"}, "mysql.writers"),
    ],
)
def test_what_no_server_of_the_tests_is(values: dict[str, str], check: str):
    facts = MysqlFacts(SOUND | values, direct=True, anonymous=False, local=True, hybrid=True)
    assert {finding.check: finding.severity for finding in judged(CHECKS, facts)} == {check: ERROR}


def test_a_proxy_and_an_open_network_are_found():
    facts = MysqlFacts(SOUND | {"version": "8.4.3"}, direct=False, anonymous=False, local=False, hybrid=True)
    assert {finding.check: finding.severity for finding in judged(CHECKS, facts)} == {
        "mysql.proxy": NOTE,
        "mysql.tls": NOTE,
    }
