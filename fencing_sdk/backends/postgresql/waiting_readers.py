"""
Readers of one client that wait for the same name and try at the same moment: one statement decides about all of them.

They are woken together, when a writer has gone. A reader that gives up before the statement is sent is not asked for.
One that has lost its place in the line asks alone, which gives it another.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk._values.shared_call import SharedBatches, ask_by_name
from fencing_sdk.backends.postgresql.connection.driver import DriverRow
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession
from fencing_sdk.backends.postgresql.requests import PostgresqlRequests, read_readers
from fencing_sdk.backends.postgresql.waiters import PostgresqlWaiters

_TOGETHER = 256
"""Readers of one statement."""

Tried = Grant | Held | Exception | None
"""What became of one reader; None: it has to ask alone."""


class WaitingReaders:
    """
    The readers of one backend that are trying now.

    Args:
        connection: Runs the statements.

        requests: The statements.

        waiters: Tells when a waiter tries again without being woken.
    """

    def __init__(
        self, connection: PostgresqlConnection, requests: PostgresqlRequests, waiters: PostgresqlWaiters
    ) -> None:
        self._connection = connection
        self._requests = requests
        self._waiters = waiters
        self._trying: set[Claim] = set()
        self._batches: SharedBatches[Claim, Tried] = SharedBatches(self._try_all, _TOGETHER, one_by_one=True)

    async def acquire(self, claim: Claim) -> Grant | Held | None:
        """
        Try together with the others; return None if the reader has to ask alone.

        Raises:
            Exception: the driver's error.
        """
        self._trying.add(claim)
        try:
            outcome = await self._batches.ask(claim)
        finally:
            self._trying.discard(claim)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _try_all(self, claims: Sequence[Claim]) -> list[Tried]:
        return await ask_by_name(claims, lambda claim: claim.name, self._try_name)

    async def _try_name(self, name: str, claims: list[Claim]) -> list[Tried]:
        asked: list[Claim] = []

        async def ask(session: PostgresqlSession) -> DriverRow | None:
            """A reader that has left meanwhile would not give back what it is granted."""
            asked[:] = [claim for claim in claims if claim in self._trying]
            arguments = self._requests.readers_arguments(name, asked)
            return await session.ask(self._requests.acquire_readers, arguments) if asked else None

        if len(claims) == 1:
            return [None]
        try:
            row = await self._connection.run(ask)
            found = read_readers(row, len(asked), self._waiters.poll) if asked else []
        except Exception as error:  # noqa: BLE001  (each reader raises it, and those of other names do not)
            return [error] * len(claims)
        outcomes: dict[Claim, Tried] = dict(zip(asked, found, strict=True))
        return [outcomes.get(claim) for claim in claims]
