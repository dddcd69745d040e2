"""What operators ask of the server: who holds what, who waits, and to take a grant away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fencing_sdk._values.claim import (
    Claim,
    Holder,
    Listing,
    Mode,
    Waiting,
    holder_of,
    mode_named,
)
from fencing_sdk.backends._shared.losses import RevocationWatcher, StopListening, name_digest
from fencing_sdk.backends._shared.rules import age_of
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession
from fencing_sdk.backends.postgresql.errors import UnreadableRowError, translating
from fencing_sdk.backends.postgresql.requests import PostgresqlRequests, columns, seconds_in, storable, token_in


class OperatorCalls:
    """The calls of operators, on the connection that the others use: each is short, whatever the number of locks."""

    def __init__(self, connection: PostgresqlConnection, requests: PostgresqlRequests) -> None:
        self._connection = connection
        self._requests = requests

    async def holders(self, name: str) -> list[Holder]:
        """Describe every holder of *name*."""
        with translating("inspect"):
            (found,) = columns(await self._connection.ask(self._requests.held, ([name],)), 1)
            return read_holders(_json(found) or [])

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`. The cursor is the name that was looked at last."""
        if not storable(prefix):
            return Listing((), None)
        with translating("list"):
            row = await self._connection.ask(self._requests.list, (prefix, cursor, limit))
            page, last = columns(row, 2)
            if not isinstance(last, str | None):
                msg = "not a name"
                raise UnreadableRowError(msg)
            return Listing(read_holders(_json(page) or []), last)

    async def list_waiters(self, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        with translating("list"):
            (found,) = columns(await self._connection.ask(self._requests.line, (name,)), 1)
            return read_line(_json(found) or [])

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with translating("revoke"):
            return columns(await self._connection.ask(self._requests.revoke, (name, token, reason)), 1)[0] is True

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """Why the ended grants of *claims* were revoked, or None."""
        names, owners = [claim.name for claim in claims], [claim.owner for claim in claims]
        (found,) = columns(await self._connection.ask(self._requests.reasons, (names, owners), urgent=True), 1)
        if not isinstance(found, list):
            msg = "not a list of reasons"
            raise UnreadableRowError(msg)
        return [None if reason is None else str(reason) for reason in found]


def read_holders(page: Sequence[dict[str, Any]]) -> list[Holder]:
    """
    Read the server's answer on the holders of some names.

    Raises:
        UnreadableRowError: it is something else.
    """
    try:
        return [_holder(name, found) for name in page for found in name["holders"] or ()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = "not a list of holders"
        raise UnreadableRowError(msg) from error


def _holder(name: dict[str, Any], found: dict[str, Any]) -> Holder:
    token, mode, permit, label = token_in(found["token"]), _mode(found), found["permit"], found["label"]
    if not (isinstance(permit, int | None) and isinstance(label, str | None)):
        raise TypeError
    return Holder(
        name=name["name"],
        token=token,
        id=holder_of(found["owner"]),
        remaining=max(0.0, seconds_in(float(found["left"]))),
        label=label,
        mode=mode,
        permit=permit,
        held_for=age_of(token, mode, int(name["now"])),
        waiters=int(name["waiters"]),
    )


def read_line(line: Sequence[dict[str, Any]]) -> list[Waiting]:
    """
    Read the server's answer on the waiters of a name.

    Raises:
        UnreadableRowError: it is something else.
    """
    try:
        return [_waiting(found) for found in line]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = "not a list of waiters"
        raise UnreadableRowError(msg) from error


def _waiting(found: dict[str, Any]) -> Waiting:
    if not isinstance(found["label"], str | None):
        raise TypeError
    return Waiting(holder_of(found["owner"]), _mode(found), _waiting_for(found), found["label"])


def _waiting_for(found: dict[str, Any]) -> float | None:
    return None if found["waiting"] is None else max(0.0, seconds_in(float(found["waiting"])))


def _mode(found: dict[str, Any]) -> Mode:
    return mode_named(found["mode"], found["permits"])


def _json(text: object) -> Any:
    """Return what is in *text*; a column of JSON is text to the driver, and None is nothing."""
    try:
        return None if text is None else json.loads(str(text))
    except ValueError as error:
        msg = "not JSON"
        raise UnreadableRowError(msg) from error


def revocation_channel(schema: str) -> str:
    """Return the channel for the revocations in a schema, as ``fencing_revoke`` computes it."""
    return f"fencing_revoked_{name_digest(schema)[:32]}"


class PostgresqlLossWatcher(RevocationWatcher):
    """
    The grants of one backend, each until it ends.

    The client hears of revocations on the connection for its requests, so that no client has one more. The connection
    listens on the one channel of the schema; `RevocationWatcher` decides when.

    A proxy that pools transactions passes no messages on, and LISTEN would stay behind in the session of another
    program. The proxy gives itself away by its process id, which is not the server's. There, the next renewal
    notices the loss.

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
        """Return whether the owner of *claim* holds the lock after all: the reason may be that of an earlier grant."""
        return claim.holder in {holder.id for holder in await self._operators.holders(claim.name)}
