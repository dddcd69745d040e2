"""Checks what leased rows need of their database, for ``fencing doctor``. It changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fencing_sdk._values.reports import Finding
from fencing_sdk.diagnosis.checks import WARNING, Check, judged
from fencing_sdk.rows._table import RowFacts

_LONGEST = 600.0

# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[RowFacts], ...] = (
    Check("rows.frozen", WARNING, lambda it: it.limits and not 0 < it.silence <= _LONGEST,
        "a transaction whose client is silent ends after {it.silence:g} s (0: never), by {it.settings}",
        "a worker that freezes in the transaction that finishes its row keeps the row locked until then",
        "for the connections of the workers, set one of them to 60 s"),
    Check("rows.pooler", WARNING, lambda it: it.pooled,
        "a proxy that pools connections stands before the server",
        "no notification comes through it: clients look for rows every poll seconds",
        "name the server itself in the URL of row_client(), or leave notify= out"),
    Check("rows.journal", WARNING, lambda it: it.journal != "wal",
        "journal_mode is {it.journal}", "a reader that takes long stops all renewals", "PRAGMA journal_mode = WAL"),
)
# fmt: on


async def findings_of(it: RowFacts) -> Sequence[Finding]:
    """Return what should be changed."""
    findings = judged(CHECKS, it)
    if it.path is not None:
        from fencing_sdk.backends.sqlite.file_system import file_system_of  # noqa: PLC0415  (servers need none of it)
        from fencing_sdk.diagnosis import local  # noqa: PLC0415

        kind = await asyncio.to_thread(file_system_of, it.path)  # a network file system may hang
        file = local.FileFacts(f"{str(it.path)!a}", kind, durable=True, hybrid=True, locks_work=None)
        findings += judged(local.CHECKS, file)
    return findings
