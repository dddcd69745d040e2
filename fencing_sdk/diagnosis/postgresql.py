"""
Checks PostgreSQL servers. Several hosts are asked on connections of their own; a single one, on the client's.

The diagnosis creates nothing, so it works before the tables are there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from fencing_sdk._values.reports import Finding, Severity
from fencing_sdk._values.url import PostgresqlUrl
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.postgresql import PostgresqlBackend
from fencing_sdk.backends.postgresql.errors import translated, translating
from fencing_sdk.diagnosis.checks import COUNTED, ERROR, WARNING, Check, StoreDiagnosis, host_down, judged

_LIMIT = 8.0
_RELOAD = "; SELECT pg_reload_conf()"
_FACTS = """
SELECT jsonb_build_object(
    'standby', pg_is_in_recovery(),
    'fsync', current_setting('fsync') = 'on',
    'full_page_writes', current_setting('full_page_writes') = 'on',
    'synchronous', current_setting('synchronous_standby_names') <> '',
    'standbys', (SELECT count(*) FROM pg_stat_replication)
)::text
"""


@dataclass(frozen=True, slots=True)
class PostgresqlFacts:
    """One server."""

    standby: bool
    fsync: bool
    full_page_writes: bool
    synchronous: bool
    """True if commits wait for a standby."""
    standbys: int
    hybrid: bool
    """True if tokens follow the clock."""

    @property
    def forgetting(self) -> Severity:
        """The severity of grants that are forgotten."""
        return WARNING if self.hybrid else ERROR

    @property
    def repeat(self) -> str:
        """The remark that tokens repeat."""
        return "" if self.hybrid else COUNTED

    @property
    def waits_for(self) -> str:
        """The standbys that every commit will wait for."""
        alone = "that standby, and hangs while it is away: add a second one"
        return alone if self.standbys == 1 else "one of them"


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[PostgresqlFacts], ...] = (
    Check("postgresql.fsync", ERROR, lambda it: not it.fsync,
        "fsync is off", "a power failure may destroy the database: leases are lost, and tokens may fall",
        f"ALTER SYSTEM SET fsync = on{_RELOAD}"),
    Check("postgresql.full-page-writes", WARNING, lambda it: not it.full_page_writes,
        "full_page_writes is off", "a power failure may destroy pages with tokens",
        f"ALTER SYSTEM SET full_page_writes = on{_RELOAD}"),
    Check("postgresql.standbys", lambda it: it.forgetting, lambda it: it.standbys and not it.synchronous,
        "{it.standbys} standbys, and none is synchronous",
        "a standby that missed the latest grants grants those locks again when it is promoted{it.repeat}",
        f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'{_RELOAD}; "
        "every commit of this server then waits for {it.waits_for}"),
)
# fmt: on


class PostgresqlDiagnosis(StoreDiagnosis[PostgresqlBackend]):
    """The checks of one store."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        hosts = self.backend._dialer.hosts
        answers = await asyncio.gather(*map(self._ask, hosts), return_exceptions=True)
        findings = []
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, PostgresqlFacts) and not answer.standby:
                findings += judged(CHECKS, answer, host.place)
            elif isinstance(answer, Exception):
                detail = translated("diagnose", answer).detail
                what = detail if isinstance(answer, NoConnectionError) else f"{host.place}: {detail}"
                fatal = not any(isinstance(each, PostgresqlFacts) for each in answers)
                findings.append(host_down("postgresql.host", what, fatal=fatal))
        return findings

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        with translating("diagnose"):
            row = await self.backend._connection.ask("SELECT extract(epoch FROM clock_timestamp())::float8", ())
        return None if row is None else float(row[0])

    async def _ask(self, host: PostgresqlUrl) -> PostgresqlFacts:
        async with asyncio.timeout(_LIMIT):
            if len(self.backend._dialer.hosts) == 1 and self.backend._connection.connected:
                row = await self.backend._connection.ask(_FACTS, ())  # the server or the role may allow no other one
            else:
                connection = await self.backend._dialer.open_host(host)
                try:
                    row = await connection.fetchrow(_FACTS)
                finally:
                    connection.terminate()
        assert row is not None
        return PostgresqlFacts(**json.loads(row[0]), hybrid=self.backend._hybrid)
