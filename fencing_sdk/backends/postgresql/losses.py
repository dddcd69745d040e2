"""
How a client hears of revocations: on the connection for its requests, so that no client has one more.

The connection listens on the one channel of the schema for its revocations; `RevocationWatcher` decides when.

A proxy that pools transactions passes no messages on, and LISTEN would stay behind in the session of another
program. The proxy is known by the process id that it has told, which is not the server's. There, the next renewal
notices the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.revocation_watcher import RevocationWatcher, StopListening, name_digest
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession
from fencing_sdk.backends.postgresql.operating import OperatorCalls


def revocation_channel(schema: str) -> str:
    """Return the channel for the revocations in a schema, as ``fencing_revoke`` computes it."""
    return f"fencing_revoked_{name_digest(schema)[:32]}"


class PostgresqlLossWatcher(RevocationWatcher):
    """
    The grants of one backend, each until it ends.

    Args:
        connection: The connection for the requests.

        operators: Asks for the reasons of revocations, and for holders.

        schema: The schema of the functions.
    """

    def __init__(self, connection: PostgresqlConnection, operators: OperatorCalls, schema: str) -> None:
        super().__init__()
        self._connection = connection
        self._operators = operators
        self._channel = revocation_channel(schema)
        self._session: PostgresqlSession | None = None
        """The connection that listens, or of which it is known that it cannot. It reports its end."""
        self._stop_at_server: StopListening | None = None

    async def listen(self) -> StopListening | None:
        """See `RevocationWatcher.listen`."""
        await self._connection.run(self._listen)
        if self._session is None or self._session.closed:
            msg = "the connection has ended"
            raise ConnectionError(msg)
        return None if self._stop_at_server is None else self._stop

    async def _listen(self, session: PostgresqlSession) -> None:
        if self._session is not session:
            self._session = session
            session.on_end(lambda: self._on_end(session))
        self._stop_at_server = None
        if await session.talks_to_server():
            self._stop_at_server = await session.listen(self._channel, self.on_message)

    def _on_end(self, session: PostgresqlSession) -> None:
        """Listen on the next connection."""
        if self._session is session:
            self.cut_off()

    async def _stop(self) -> None:
        await self._connection.run(self._stop_on)

    async def _stop_on(self, session: PostgresqlSession) -> None:
        stop, self._stop_at_server = self._stop_at_server, None
        if stop is not None and self._session is session:
            await stop()

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """See `RevocationWatcher.reasons`."""
        found = await self._operators.reasons(claims)
        return [
            None if reason is None or await self._is_held(claim) else reason
            for claim, reason in zip(claims, found, strict=True)
        ]

    async def _is_held(self, claim: Claim) -> bool:
        """Whether the owner of *claim* holds the lock after all: the reason may be that of an earlier grant."""
        return claim.holder in {holder.holder for holder in await self._operators.holders(claim.name)}
