"""
Notices a grant that an operator has taken away, before its next renewal.

1. The connection for the requests also listens, on the one channel of the schema where every revocation is told, once a
   grant was held for a moment. So a short hold costs nothing, and no client has one more connection. It stops when
   no lock was held for a while, because every message of the database costs the server something for each listener.
2. A message has a digest of the lock's name, and proves nothing: the server is asked for the reason, and whether the
   owner really does not hold the lock any more.
3. Messages are lost while a connection is broken. So all grants are looked at when a connection begins to listen.

A proxy that pools transactions passes no messages on, and LISTEN would stay behind in the session of another
program. The proxy is known by the process id that it has told, which is not the server's. There, the next renewal
notices the loss. So it does if the message overtakes the answer that granted the lock.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.ownership import LoopOwner
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession
from fencing_sdk.backends.postgresql.operating import OperatorCalls
from fencing_sdk.errors import LossReason

_MOMENT = 0.5
"""Seconds for which a lock is held before the connection listens."""
_IDLE = 10.0
"""Seconds without a lock after which it listens no more."""
_LAST_PAUSE = 15.0
"""Seconds between two attempts while the server does not answer; the first ones follow one another faster."""

_Key = tuple[str, str]


def revocation_channel(schema: str) -> str:
    """Return the channel on which the revocations of a schema are told, as ``fencing_revoke_v2`` computes it."""
    return f"fencing_revoked_{name_digest(schema)[:32]}"


def name_digest(name: str) -> str:
    """Return what a message tells of a name: names are long, and no concern of others that listen."""
    return hashlib.sha256(name.encode()).hexdigest()


class PostgresqlLossWatcher:
    """
    The grants of one backend, each until it ends.

    Args:
        connection: The connection for the requests.

        operators: Asks for the reasons of revocations, and for holders.

        schema: The schema of the functions.
    """

    def __init__(self, connection: PostgresqlConnection, operators: OperatorCalls, schema: str) -> None:
        self._connection = connection
        self._operators = operators
        self._channel = revocation_channel(schema)
        self._notices = LossNotices()
        self._owner: LoopOwner | None = None
        self._held: dict[_Key, Claim] = {}
        self._due: dict[_Key, None] = {}
        """Grants that are to be looked at."""
        self._session: PostgresqlSession | None = None
        """The connection that listens, or of which it is known that it cannot."""
        self._followed: PostgresqlSession | None = None
        """The connection that reports its end."""
        self._stop_listening: Callable[[], Awaitable[None]] | None = None
        self._task = BackgroundTask()
        self._stopping = BackgroundTask()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._notices.on_loss(notice)

    def granted(self, claim: Claim) -> None:
        """Watch a grant, if a client wants notices."""
        if not self._notices:
            return
        if self._owner is None or not self._owner.is_current:
            self._owner = LoopOwner()
            self._forget()
        self._held[claim.name, claim.owner] = claim
        if self._session is None:
            self._task.start(self._notice_losses)

    def ended(self, claim: Claim) -> None:
        """Stop watching a grant: its holder releases it, or knows that it is lost."""
        self._held.pop((claim.name, claim.owner), None)
        if not self._held and self._stop_listening is not None:
            self._stopping.start(self._stop_when_idle)

    async def _notice_losses(self) -> None:
        """Listen, unless the connection does so already, and look at the grants that are due."""
        pause = _MOMENT
        while self._held and (self._session is None or self._due):
            if self._session is None and not await self._held_for(pause):
                continue
            try:
                if self._session is None:
                    await self._connection.run(self._listen)
                await self._look()
                pause = _MOMENT
            except Exception:  # noqa: BLE001  (until the next attempt, the heartbeat notices losses)
                pause = min(pause * random.uniform(1.5, 2.0), _LAST_PAUSE)
                if self._session is not None:
                    await asyncio.sleep(pause)

    async def _held_for(self, seconds: float) -> bool:
        before = tuple(self._held)
        await asyncio.sleep(seconds)
        return any(key in self._held for key in before)

    async def _listen(self, session: PostgresqlSession) -> None:
        if self._followed is not session:
            self._followed = session
            session.on_end(lambda: self._on_end(session))
        stop: Callable[[], Awaitable[None]] | None = None
        if await session.talks_to_server():
            stop = await session.listen(self._channel, self._on_notify)
            self._due.update(dict.fromkeys(self._held))
        if not session.closed:  # or its end was told already
            self._session, self._stop_listening = session, stop

    async def _stop_when_idle(self) -> None:
        await asyncio.sleep(_IDLE)
        with suppress(Exception):  # the connection breaks, and listens no more
            await self._connection.run(self._stop)

    async def _stop(self, session: PostgresqlSession) -> None:
        if self._stop_listening is None or self._held or self._session is not session:
            return
        stop, self._stop_listening, self._session = self._stop_listening, None, None
        await stop()

    def _on_end(self, session: PostgresqlSession) -> None:
        """Listen on the next connection."""
        if self._session is session:
            self._session = self._stop_listening = None
            if self._held:
                self._task.start(self._notice_losses)

    def _on_notify(self, digest: str) -> None:
        self._due.update(dict.fromkeys(key for key in self._held if name_digest(key[0]) == digest))
        if self._due:
            self._task.start(self._notice_losses)

    async def _look(self) -> None:
        """Tell the clients of the grants that are due, and revoked."""
        due, self._due = self._due, {}
        claims = [self._held[key] for key in due if key in self._held]
        if not claims:
            return
        try:
            for claim, reason in zip(claims, await self._operators.reasons(claims), strict=True):
                if reason is not None and not await self._is_held(claim):
                    self._lost(claim, reason)
        except BaseException:
            self._due = due | self._due
            raise

    async def _is_held(self, claim: Claim) -> bool:
        """Whether the owner of *claim* holds the lock after all: the reason may be that of an earlier grant."""
        return claim.holder in {holder.holder for holder in await self._operators.holders(claim.name)}

    def _lost(self, claim: Claim, reason: str) -> None:
        if self._held.pop((claim.name, claim.owner), None) is not None:  # unless it was released meanwhile
            self._notices.tell(claim, LossReason.REVOKED, reason)

    def _forget(self) -> None:
        self._held, self._due, self._session, self._stop_listening = {}, {}, None, None

    async def aclose(self) -> None:
        """Watch nothing any more, before the connection is closed."""
        self._forget()
        await self._task.aclose()
        await self._stopping.aclose()
