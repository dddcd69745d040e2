"""
A grant that raises the fences of the same database: one transaction, so there is both or neither.

It has a connection apart from that of the renewals. A fence is held by whoever writes under it until its transaction
ends, and only fences may have to wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from fencing_sdk._values.claim import Claim, Token
from fencing_sdk.abc import Guard, TransactionalGuard
from fencing_sdk.backends.postgresql._calls import Arguments
from fencing_sdk.backends.postgresql._driver import Connection, Row, code_of
from fencing_sdk.backends.postgresql._link import Do
from fencing_sdk.backends.postgresql._session import Session
from fencing_sdk.backends.postgresql._translation import BACKEND
from fencing_sdk.errors import BackendRefusedError, shown

FENCE_PATIENCE = 1.0
"""Seconds to wait for a transaction that holds a fence; then the others have their turn, and this is tried again."""


class JointGrant:
    """One attempt to acquire, with the fences that go along."""

    def __init__(self, statement: str, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> None:
        self._statement = statement
        self._claim = claim
        self._fences = [(cast("TransactionalGuard", guard), resource) for guard, resource in fences]

    def with_arguments(self, arguments: Arguments) -> Do:
        """What is to be done on a session."""
        return partial(self._do, arguments)

    async def _do(self, arguments: Arguments, session: Session) -> Row | None:
        return await session.transact(partial(self._grant_and_raise, arguments))

    async def _grant_and_raise(self, arguments: Arguments, connection: Connection) -> Row | None:
        row = await connection.fetchrow(self._statement, *arguments)
        if row is not None and row[0] is not None:
            token = Token(row[0], self._claim.holder)
            for guard, resource in self._fences:
                await _raise_in(connection, guard, resource, token)
        return row


async def _raise_in(connection: Connection, guard: TransactionalGuard, resource: str, token: Token) -> None:
    """
    Raise one fence. What is missing then is the guard's, and not the schema of the locks.

    Raises:
        BackendRefusedError: the guard lacks its table, its schema or a permission.
        Exception: whatever else the driver or the guard raises.
    """
    try:
        await guard.raise_in(connection, resource, token, wait=FENCE_PATIENCE)
    except Exception as error:
        code = code_of(error)
        if code not in _LACKING:
            raise
        notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        why = "; ".join(notes) or "its table, its schema or a permission is missing"
        detail = f"the guard cannot raise the fence of {shown(resource)}: {why} ({code})"
        raise BackendRefusedError(BACKEND, "acquire", detail) from error


_LACKING = {"3F000", "42501", "42703", "42804", "42P01"}
"""SQLSTATEs of a statement about what is not there, has another form, or is not permitted."""
_NOTE = "fencing_sdk: "
"""How a note of our own on a driver's error begins. What the server itself says is never repeated."""
