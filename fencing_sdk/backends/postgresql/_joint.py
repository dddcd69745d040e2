"""
A grant that raises the fences of the same database: one transaction, so there is both or neither.

It has a connection apart from that of the renewals. A fence is held by whoever writes under it until its transaction
ends, and only fences may have to wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from fencing_sdk._claim import Claim, Token
from fencing_sdk.abc import Guard, TransactionalGuard
from fencing_sdk.backends.postgresql._calls import Arguments
from fencing_sdk.backends.postgresql._driver import Connection, Row
from fencing_sdk.backends.postgresql._link import Do
from fencing_sdk.backends.postgresql._session import Session

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
                await guard.raise_in(connection, resource, token, wait=FENCE_PATIENCE)
        return row
