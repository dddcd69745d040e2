"""
Acquires a lock and raises fences in the same database: one transaction, so the server does both or neither.

It runs on another connection than the renewals. A transaction that writes under a fence locks it until it ends. Only
acquisitions with fences may have to wait for that, never renewals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from fencing_sdk._values.claim import Claim, Token
from fencing_sdk.abc import Guard, TransactionalGuard
from fencing_sdk.backends.postgresql.connection.driver import DriverConnection, DriverRow, code_of
from fencing_sdk.backends.postgresql.connection.request_queue import RequestBody
from fencing_sdk.backends.postgresql.errors import BACKEND
from fencing_sdk.backends.postgresql.requests import Arguments
from fencing_sdk.errors import BackendRefusedError, shown

FENCE_PATIENCE = 1.0
"""Seconds to wait for a transaction that holds a fence. Then other acquisitions have their turn before the next try."""

_MISSING = {"3F000", "42501", "42703", "42804", "42P01"}
"""SQLSTATEs of a statement about a schema, table or column that is missing, has another type, or is not permitted."""
_NOTE = "fencing_sdk: "
"""How a guard's own note on a driver's error begins. The message of the server is never repeated."""


class FencedAcquire:
    """
    One try to acquire a lock and raise fences.

    Args:
        claim: What it acquires.

        fences: Each guard, and the resource whose fence it raises.
    """

    def __init__(self, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> None:
        self._claim = claim
        self._fences = [(cast("TransactionalGuard", guard), resource) for guard, resource in fences]

    def request(self, statement: str, arguments: Arguments) -> RequestBody:
        """Return the request: a *statement* that acquires, with its *arguments*, and the fences."""
        return lambda session: session.transact(partial(self._acquire_and_raise, statement, arguments))

    async def _acquire_and_raise(
        self, statement: str, arguments: Arguments, connection: DriverConnection
    ) -> DriverRow | None:
        row = await connection.fetchrow(statement, *arguments)
        if row is not None and row[0] is not None:
            token = Token(row[0], self._claim.holder)
            for guard, resource in self._fences:
                await _raise_fence(connection, guard, resource, token)
        return row


async def _raise_fence(connection: DriverConnection, guard: TransactionalGuard, resource: str, token: Token) -> None:
    """
    Raise one fence. If a schema or table is missing now, it is the guard's, not that of the locks.

    Raises:
        BackendRefusedError: the guard lacks its table, its schema or a permission.
        Exception: any other error of the driver or the guard.
    """
    try:
        await guard.raise_in(connection, resource, token, wait=FENCE_PATIENCE)
    except Exception as error:
        code = code_of(error)
        if code not in _MISSING:
            raise
        notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        why = "; ".join(notes) or "its table, its schema or a permission is missing"
        detail = f"the guard cannot raise the fence of {shown(resource)}: {why} ({code})"
        raise BackendRefusedError(BACKEND, "acquire", detail) from error
