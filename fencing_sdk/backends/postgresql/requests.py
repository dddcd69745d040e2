"""
The requests to the server, and how its answers are read. No I/O happens here.

Each request is one call of a function of `schema.sql`. Numbers there are microseconds; here they are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from fencing_sdk._values.claim import Busy, Claim, Grant, Mode, Permit, Renewal
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.fences import FenceRaising, Fences
from fencing_sdk.backends._shared.rules import handed_over
from fencing_sdk.backends.postgresql.connection.driver import DriverConnection, DriverRow, code_of
from fencing_sdk.backends.postgresql.connection.request_queue import RequestBody
from fencing_sdk.backends.postgresql.errors import BACKEND, UnreadableRowError
from fencing_sdk.backends.postgresql.schema import quoted
from fencing_sdk.errors import BackendRefusedError

ROW_PATIENCE_MS = 100
"""Milliseconds that a renewal waits for rows that another transaction keeps locked."""

_RENEWALS = {"1": Renewal.RENEWED, "0": Renewal.REFUSED, "x": Renewal.TAKEN_OVER}
_SHARED = "s"
_MOST_MICROS = 2**53
_NO_PLACE = -1

Arguments = tuple[object, ...]


class PostgresqlRequests:
    """The statements for one schema, and the arguments of those that need more than a name."""

    def __init__(self, schema: str, *, hybrid: bool) -> None:
        functions = quoted(schema)
        self._hybrid = hybrid
        self.acquire = f"SELECT * FROM {functions}.fencing_acquire($1, $2, $3, $4, $5, $6)"  # noqa: S608
        self.decide = f"SELECT * FROM {functions}.fencing_decide($1, $2, $3, $4, $5, $6, $7, $8, $9)"  # noqa: S608
        self.acquire_readers = f"SELECT * FROM {functions}.fencing_readers($1, $2, $3, $4, $5)"  # noqa: S608
        self.renew = f"SELECT {functions}.fencing_renew($1, $2, $3, $4)"
        self.release = f"SELECT {functions}.fencing_release($1, $2)"
        self.give_back = f"SELECT {functions}.fencing_give_back($1, $2)"
        self.join = f"SELECT {functions}.fencing_join($1, $2, $3, $4, $5, $6, $7)"
        self.leave = f"SELECT {functions}.fencing_leave($1, $2)"
        self.notify = "SELECT pg_catalog.pg_notify($1, $2)"
        self.sweep = f"SELECT {functions}.fencing_sweep($1)"

        self.held = f"SELECT {functions}.fencing_held($1)"
        self.list = f"SELECT * FROM {functions}.fencing_list($1, $2, $3)"  # noqa: S608
        self.line = f"SELECT {functions}.fencing_line($1)"
        self.revoke = f"SELECT {functions}.fencing_revoke($1, $2, $3)"
        self.transfer = f"SELECT * FROM {functions}.fencing_transfer($1, $2, $3, $4, $5, $6, $7)"  # noqa: S608
        self.reasons = f"SELECT {functions}.fencing_reasons($1, $2)"

    def acquisition(self, claim: Claim, channel: str | None, ticket: str | None) -> tuple[str, Arguments]:
        """
        Return the statement that acquires, and its arguments. A waiter in a line gives its *channel* and *ticket*.

        Raises:
            BackendRefusedError: a text or number of the claim cannot be stored.
        """
        _check_storable(claim)
        mode, permits = mode_arguments(claim.mode)
        asked = (claim.name, claim.owner, _micros(claim), claim.label, self._hybrid, mode)
        if channel is None and not claim.mode.shared:
            return self.acquire, asked
        return self.decide, (*asked, permits, channel, ticket)

    def transfer_arguments(self, of: Claim, to: Claim) -> Arguments:
        """
        Return the arguments of `transfer`.

        Raises:
            BackendRefusedError: a text or number of *to* cannot be stored.
        """
        _check_storable(to)
        return of.name, of.owner, to.owner, _micros(to), to.label, self._hybrid, handed_over(to)

    def readers_arguments(self, name: str, claims: Sequence[Claim]) -> Arguments:
        """Return the arguments of `acquire_readers`, for claims of which each has a place in the line."""
        return (
            name,
            [claim.owner for claim in claims],
            [str(_micros(claim)) for claim in claims],
            [claim.label for claim in claims],
            self._hybrid,
        )

    def renew_arguments(self, claims: Sequence[Claim], patience_ms: int) -> Arguments:
        """Return the arguments of `renew`, for claims whose names are `storable_names`."""
        return (
            [claim.name for claim in claims],
            [claim.owner for claim in claims],
            [str(_micros(claim)) for claim in claims],
            patience_ms,
        )


def mode_arguments(mode: Mode) -> Arguments:
    """Return a mode as the tables have it, and the number of permits."""
    return (mode.word, mode.of if isinstance(mode, Permit) else None)


def storable_names(claims: Sequence[Claim]) -> list[int]:
    """Return the indexes of the claims whose names can be stored. One other name would fail the whole statement."""
    return [index for index, claim in enumerate(claims) if storable(claim.name)]


def storable(text: str) -> bool:
    """Return whether PostgreSQL can store *text*, as far as that is the same in every encoding."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _check_storable(claim: Claim) -> None:
    if not (storable(claim.name) and (claim.label is None or storable(claim.label))):
        raise BackendRefusedError(BACKEND, "acquire", "a name or a label has a NUL or a lone surrogate; escape it")


def _micros(claim: Claim) -> int:
    """Round up, because the server may keep a grant for longer than the ttl, but never for less."""
    if not claim.ttl * 1e6 < _MOST_MICROS:
        raise BackendRefusedError(BACKEND, "acquire", "the ttl is too large to be stored")
    return math.ceil(claim.ttl * 1e6)


def read_outcome(row: DriverRow | None, poll: float | None) -> Grant | Busy:
    """
    Read the answer to `PostgresqlRequests.acquisition`. A waiter tries again after *poll* seconds at the latest.

    Raises:
        UnreadableRowError: the row is not such an answer, so whether the lock was granted is unknown.
    """
    token, seconds_left, permit = columns(row, 3)
    if token is None:
        retry_after = seconds_in(seconds_left)
        return Busy(retry_after if poll is None else min(retry_after, poll))
    if permit is None or (isinstance(permit, int) and not isinstance(permit, bool) and permit >= 0):
        return Grant(token_in(token), permit=permit)
    msg = "not the number of a permit"
    raise UnreadableRowError(msg)


def read_transfer(row: DriverRow | None, of: Claim) -> Grant | Renewal:
    """
    Read the answer to `PostgresqlRequests.transfer`.

    Raises:
        UnreadableRowError: the row is not such an answer, so which owner holds is unknown.
    """
    token, permit, refusal = columns(row, 3)
    if refusal is None:
        grant = read_outcome((token, None, permit), None)
        assert isinstance(grant, Grant)
        return grant
    if (renewal := _renewal(str(refusal), of)) is Renewal.UNKNOWN:
        msg = "not an answer to a transfer"
        raise UnreadableRowError(msg)
    return renewal


def read_readers(row: DriverRow | None, count: int, poll: float) -> list[Grant | Busy | None]:
    """
    Read the answer to `PostgresqlRequests.acquire_readers`: None for each reader that has to ask alone.

    Raises:
        UnreadableRowError: the row is not such an answer, so which readers were granted is unknown.
    """
    tokens, seconds_left = columns(row, 2)
    if not isinstance(tokens, list) or len(tokens) != count:
        msg = f"not {count} tokens"
        raise UnreadableRowError(msg)
    return [None if token == _NO_PLACE else read_outcome((token, seconds_left, None), poll) for token in tokens]


def read_renewals(row: DriverRow | None, claims: Sequence[Claim]) -> list[Renewal]:
    """
    Read the answer to `PostgresqlRequests.renew`: one character for each claim.

    Raises:
        UnreadableRowError: the row is not such an answer.
    """
    characters = columns(row, 1)[0] or ""
    if isinstance(characters, str) and len(characters) == len(claims):
        return [_renewal(*pair) for pair in zip(characters, claims, strict=True)]
    msg = f"not {len(claims)} characters"
    raise UnreadableRowError(msg)


def read_release(row: DriverRow | None, claim: Claim) -> Renewal | None:
    """
    Read the answer to `PostgresqlRequests.release`: None if it has ended the owner's grant.

    Raises:
        UnreadableRowError: the row is not such an answer.
    """
    (outcome,) = read_renewals(row, [claim])
    if outcome is Renewal.UNKNOWN:
        msg = "not an answer to a release"
        raise UnreadableRowError(msg)
    return None if outcome is Renewal.RENEWED else outcome


def _renewal(character: str, claim: Claim) -> Renewal:
    """Read one character. Others share the name: that does not take a share over."""
    if character == _SHARED:
        return Renewal.REFUSED if claim.mode.shared else Renewal.TAKEN_OVER
    return _RENEWALS.get(character, Renewal.UNKNOWN)


def columns(row: DriverRow | None, count: int) -> Sequence[object]:
    """Return the columns of an answer. A function with more or fewer belongs to another program."""
    found = () if row is None else tuple(row)
    if len(found) == count:
        return found
    msg = f"not {count} columns"
    raise UnreadableRowError(msg)


def token_in(value: object) -> int:
    """Return a token from an answer."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_LIMIT:
        return value
    msg = "not a token"
    raise UnreadableRowError(msg)


def seconds_in(value: object) -> float:
    """Return seconds from an answer."""
    if isinstance(value, float) and not math.isnan(value):
        return value
    msg = "not a number of seconds"
    raise UnreadableRowError(msg)


_MISSING = {"3F000", "42501", "42703", "42804", "42P01"}
_RAISING = FenceRaising(BACKEND, code_of, _MISSING)


class FencedAcquire:
    """
    One try to acquire a lock and raise fences.

    The fences are in the same database. One transaction acquires and raises, so the server does both or neither. It
    runs on another connection than the renewals: a transaction that writes under a fence locks it until it ends, and
    only acquisitions with fences may have to wait for that.

    Args:
        claim: What it acquires.

        fences: Each guard, and the resource whose fence it raises.
    """

    def __init__(self, claim: Claim, fences: Fences) -> None:
        self._claim = claim
        self._fences = fences

    def request(self, statement: str, arguments: Arguments) -> RequestBody:
        """Return the request: a *statement* that acquires, with its *arguments*, and the fences."""
        return lambda session: session.transact(partial(self._acquire_and_raise, statement, arguments))

    async def _acquire_and_raise(
        self, statement: str, arguments: Arguments, connection: DriverConnection
    ) -> DriverRow | None:
        row = await connection.fetchrow(statement, *arguments)
        if row is not None and row[0] is not None:
            await _RAISING.raise_all(connection, self._claim, self._fences, row[0])
        return row
