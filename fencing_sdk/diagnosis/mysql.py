"""
What a MySQL or MariaDB server reports of itself, and what of that breaks a promise.

The diagnosis asks each host on a connection of its own. It creates nothing, so the diagnosis works before the tables
are there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from fencing_sdk._mysql import writers
from fencing_sdk._mysql.driver import Rows, ServerError
from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk._values.reports import Finding, error, is_local
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.mysql import MysqlBackend
from fencing_sdk.backends.mysql.errors import translated, translating
from fencing_sdk.backends.mysql.rows import NOW, SECOND
from fencing_sdk.backends.mysql.session import MysqlSession
from fencing_sdk.diagnosis.checks import ERROR, NOTE, WARNING, Check, StoreDiagnosis, host_down, judged, unencrypted

_LIMIT = 8.0
_OLDEST = {True: (10, 6), False: (8, 0)}
"""By whether it is MariaDB."""
_NEARLY_FULL = 0.9
_VARIABLES = (
    "binlog_format",
    "innodb_flush_log_at_trx_commit",
    "log_bin",
    "max_connections",
    "read_only",
    "sync_binlog",
    "version",
    *writers.VARIABLES,
)
_FACTS = (
    writers.ask_for(*_VARIABLES),
    "SHOW GLOBAL STATUS LIKE 'Threads_connected'",
    "SHOW SESSION STATUS LIKE 'Ssl_cipher'",
)
_ANONYMOUS = "SELECT COUNT(*) FROM mysql.user WHERE user = ''"


class MysqlFacts:
    """
    One server.

    Args:
        values: Its variables and its status, by their names in lower case.

        direct: Whether the connection has the number that the server gave it.

        anonymous: Whether the server has a user without a name, as far as this user may know.

        local: Whether the connection stays on this machine.

        hybrid: Whether tokens follow the clock.
    """

    def __init__(self, values: Mapping[str, str], *, direct: bool, anonymous: bool, local: bool, hybrid: bool) -> None:
        self.version = values.get("version", "")
        self.mariadb = "MariaDB" in self.version
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        self.too_old = numbers is not None and (int(numbers[1]), int(numbers[2])) < _OLDEST[self.mariadb]
        self.needed = "MariaDB 10.6" if self.mariadb else "MySQL 8.0"
        self.read_only = values.get("read_only", "OFF") != "OFF"
        self.flush = values.get("innodb_flush_log_at_trx_commit", "1")
        self.beside_others = writers.several_writers(values) is not None
        self.logged = values.get("log_bin", "OFF") == "ON"
        self.sync_binlog, self.format = values.get("sync_binlog", "1"), values.get("binlog_format", "ROW")
        self.used, self.limit = int(values.get("threads_connected", 0)), int(values.get("max_connections", 0))
        self.exposed = not local and not values.get("ssl_cipher")
        self.direct, self.anonymous, self.hybrid = direct, anonymous, hybrid


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[MysqlFacts], ...] = (
    Check("mysql.version", ERROR, lambda it: it.too_old,
        "version {it.version}", "renewals need SKIP LOCKED, which came with {it.needed}", "upgrade the server"),
    Check("mysql.flush", ERROR, lambda it: it.flush == "0",
        "innodb_flush_log_at_trx_commit is 0", "a crash forgets grants that were acknowledged: no lock is taken here",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf"),
    Check("mysql.flush", WARNING, lambda it: it.flush == "2",
        "innodb_flush_log_at_trx_commit is 2", "a power failure forgets the grants of the last second",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf"),
    Check("mysql.sync-binlog", WARNING, lambda it: it.logged and it.sync_binlog != "1",
        "sync_binlog is {it.sync_binlog}", "after a power failure a replica may have other grants than this server",
        "SET GLOBAL sync_binlog = 1, and in my.cnf"),
    Check("mysql.binlog-format", ERROR, lambda it: it.logged and it.format == "STATEMENT",
        "binlog_format is STATEMENT", "the server refuses READ COMMITTED with it, so no lock can be taken",
        "SET GLOBAL binlog_format = 'ROW', and in my.cnf"),
    Check("mysql.writers", ERROR, lambda it: it.beside_others,
        "several servers take writes", "their row locks stay on one node, so two clients may get one lock",
        "use a server that writes alone; in Group Replication group_replication_single_primary_mode = ON"),
    Check("mysql.counter", WARNING, lambda it: it.logged and not it.hybrid,
        "tokens=counter, and the server writes a log for replicas",
        "a replica that missed the latest grants repeats their tokens when it is promoted", "tokens=hybrid"),
    Check("mysql.connections", WARNING, lambda it: it.used > _NEARLY_FULL * it.limit,
        "{it.used} of {it.limit} connections are in use", "a client that reconnects may be refused, and lose leases",
        "SET GLOBAL max_connections to more, and in my.cnf, or end idle connections"),
    Check("mysql.proxy", NOTE, lambda it: not it.direct,
        "a proxy stands before the server, which numbers connections by itself",
        "KILL QUERY would reach the wrong connection: waiters try once a second, and holders learn of a revocation "
        "at their next renewal", "give the locks a URL that leads to the server directly"),
    Check("mysql.anonymous", WARNING, lambda it: it.anonymous,
        "the server has a user without a name",
        "it wins over 'app'@'%' where it has a host of its own: a right password is refused there (1045)",
        "DROP USER ''@'localhost', and for each other host of it"),
    unencrypted("mysql.tls", lambda it: it.exposed, "?tls=true"),
)
# fmt: on


class MysqlDiagnosis(StoreDiagnosis[MysqlBackend]):
    """The checks of one store."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        hosts = self.backend._mysql.dialer.hosts
        answers = await asyncio.gather(*map(self._ask, hosts), return_exceptions=True)
        found = list(zip((host.place for host in hosts), answers, strict=True))
        facts = [(place, answer) for place, answer in found if isinstance(answer, MysqlFacts)]
        findings = [_down(place, answer, fatal=not facts) for place, answer in found if isinstance(answer, Exception)]
        writers = [(place, each) for place, each in facts if not each.read_only]
        if facts and not writers:
            what = f"{', '.join(place for place, _ in facts)}: every host is read-only"
            fix = "name the primary in the URL too, or promote a replica: SET GLOBAL read_only = OFF"
            findings.append(error("mysql.read-only", what, "no lock can be taken", fix))
        if len(writers) > 1:
            what = f"{', '.join(place for place, _ in writers)}: each takes writes"
            reason = "clients that choose different hosts do not exclude each other"
            findings.append(error("mysql.writers", what, reason, "SET GLOBAL read_only = ON on every replica"))
        return [*findings, *(finding for place, each in writers for finding in judged(CHECKS, each, place))]

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        with translating("diagnose"):
            (((micros,),),) = await self.backend._mysql.ask(f"SELECT {NOW}")
        return int(micros) / SECOND

    async def _ask(self, host: MysqlUrl) -> MysqlFacts:
        async with asyncio.timeout(_LIMIT):
            session = await self.backend._mysql.dialer.open_host(host)
            try:
                answers = await session.ask(*_FACTS)
                anonymous = await _has_anonymous(session)
            finally:
                session.drop()
        local = host.unix_socket is not None or is_local(host.addresses[0].host)
        hybrid = self.backend._mysql.hybrid
        return MysqlFacts(_values(answers), direct=session.direct, anonymous=anonymous, local=local, hybrid=hybrid)


async def _has_anonymous(session: MysqlSession) -> bool:
    try:
        (((count,),),) = await session.ask(_ANONYMOUS)
    except ServerError:  # this user may not know
        return False
    return bool(count)


def _values(answers: Sequence[Rows]) -> dict[str, str]:
    return {str(name).lower(): str(value) for found in answers for name, value in found}


def _down(place: str, failure: Exception, *, fatal: bool) -> Finding:
    detail = translated("diagnose", failure).detail
    what = detail if isinstance(failure, NoConnectionError) else f"{place}: {detail}"
    fix = "start the server, or correct its address, its login, bind_address or the firewall"
    return host_down("mysql.host", what, fix, fatal=fatal)
