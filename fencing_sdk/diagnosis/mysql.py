"""
Checks MySQL and MariaDB servers. Several hosts are asked on connections of their own; a single one, on the client's.

The diagnosis creates nothing, so it works before the tables are there. The backend itself refuses a server that cannot
keep a promise: several writers, or `innodb_flush_log_at_trx_commit` 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fencing_sdk._mysql import READ_ONLY, ask_for, read_only, values_of
from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk._values.reports import Finding
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.mysql import MysqlBackend
from fencing_sdk.backends.mysql.connection import NOW, SECOND
from fencing_sdk.backends.mysql.errors import translated, translating
from fencing_sdk.diagnosis.checks import ERROR, WARNING, Check, StoreDiagnosis, host_down, judged

_LIMIT = 8.0
_VARIABLES = ("innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", *READ_ONLY)


@dataclass(frozen=True, slots=True)
class MysqlFacts:
    """One server."""

    read_only: bool
    flush: str
    sync_binlog: str
    logged: bool
    """True if it writes a log for replicas."""
    hybrid: bool
    """True if tokens follow the clock."""


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[MysqlFacts], ...] = (
    Check("mysql.flush", WARNING, lambda it: it.flush == "2",
        "innodb_flush_log_at_trx_commit is 2", "a power failure forgets the grants of the last second",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf"),
    Check("mysql.sync-binlog", WARNING, lambda it: it.logged and it.sync_binlog != "1",
        "sync_binlog is {it.sync_binlog}", "after a power failure a replica may have other grants than this server",
        "SET GLOBAL sync_binlog = 1, and in my.cnf"),
    Check("mysql.counter", WARNING, lambda it: it.logged and not it.hybrid,
        "tokens=counter, and the server writes a log for replicas",
        "a replica that missed the latest grants repeats their tokens when it is promoted", "tokens=hybrid"),
)
# fmt: on


class MysqlDiagnosis(StoreDiagnosis[MysqlBackend]):
    """The checks of one store."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        hosts = self.backend._mysql.dialer.hosts
        answers = await asyncio.gather(*map(self._ask, hosts), return_exceptions=True)
        found = list(zip((host.place for host in hosts), answers, strict=True))
        up = [(place, answer) for place, answer in found if isinstance(answer, MysqlFacts)]
        findings = []
        for place, answer in found:
            if isinstance(answer, Exception):
                detail = translated("diagnose", answer).detail
                what = detail if isinstance(answer, NoConnectionError) else f"{place}: {detail}"
                findings.append(host_down("mysql.host", what, fatal=not up))
        primaries = [(place, each) for place, each in up if not each.read_only]
        if len(primaries) > 1:
            what = f"{', '.join(place for place, _ in primaries)}: each takes writes"
            reason = "clients that choose different hosts do not exclude each other"
            fix = "make all but one read-only: SET GLOBAL read_only = ON, or the parameters of a managed service"
            findings.append(Finding("mysql.writers", ERROR, what, reason, fix))
        return [*findings, *(finding for place, each in primaries for finding in judged(CHECKS, each, place))]

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        with translating("diagnose"):
            (((micros,),),) = await self.backend._mysql.ask(f"SELECT {NOW}")
        return int(micros) / SECOND

    async def _ask(self, host: MysqlUrl) -> MysqlFacts:
        async with asyncio.timeout(_LIMIT):
            store = self.backend._mysql
            if len(store.dialer.hosts) == 1 and store.connected:
                (rows,) = await store.ask(ask_for(*_VARIABLES))  # the server or the user may allow no other connection
            else:
                session = await store.dialer.open_host(host)
                try:
                    (rows,) = await session.ask(ask_for(*_VARIABLES))
                finally:
                    session.drop()
        values = values_of(rows)
        return MysqlFacts(
            read_only=read_only(values) is not None,
            flush=values.get("innodb_flush_log_at_trx_commit", "1"),
            sync_binlog=values.get("sync_binlog", "1"),
            logged=values.get("log_bin") == "ON",
            hybrid=self.backend._mysql.hybrid,
        )
