"""
The requests to the server, and how its answers are read. No I/O happens here.

Each request is one call of a function of `schema.sql`. Numbers there are microseconds; here they are seconds. A reading
function raises `UnreadableRowError` for what no function of this version returns: the outcome is unknown then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fencing_sdk._values.claim import (
    Busy,
    Claim,
    Grant,
    Holder,
    Listing,
    Mode,
    Permit,
    Renewal,
    Waiting,
    holder_of,
    mode_named,
)
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.abc._powers import Raising
from fencing_sdk.backends._shared.error_translation import FENCE_PATIENCE, Fences
from fencing_sdk.backends._shared.rules import age_of, handed_over
from fencing_sdk.backends.postgresql.driver import DriverRow
from fencing_sdk.backends.postgresql.errors import BACKEND, UnreadableRowError
from fencing_sdk.backends.postgresql.schema import quoted
from fencing_sdk.errors import BackendRefusedError

ROW_PATIENCE_MS = 100
"""Milliseconds that a renewal waits for rows that another transaction keeps locked."""

_RENEWALS = {"1": Renewal.RENEWED, "0": Renewal.REFUSED, "x": Renewal.TAKEN_OVER}
_SHARED = "s"
_MOST_MICROS = 2**53
_NO_PLACE = -1

T = TypeVar("T")
Arguments = tuple[object, ...]


class PostgresqlRequests:
    """The statements for one schema, and the arguments of those that need more than a name."""

    def __init__(self, schema: str, *, hybrid: bool) -> None:
        functions = quoted(schema)
        self.hybrid = hybrid
        self.acquire = f"SELECT * FROM {functions}.fencing_acquire($1, $2, $3, $4, $5, $6)"  # noqa: S608
        self.decide = f"SELECT * FROM {functions}.fencing_decide($1, $2, $3, $4, $5, $6, $7, $8, $9)"  # noqa: S608
        parameters = ", ".join(f"${number}" for number in range(1, 13))
        self.acquire_fenced = f"SELECT * FROM {functions}.fencing_acquire_fenced({parameters})"  # noqa: S608
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
        asked = (claim.name, claim.owner, _micros(claim), claim.label, self.hybrid, mode)
        if channel is None and not claim.mode.shared:
            return self.acquire, asked
        return self.decide, (*asked, permits, channel, ticket)

    @staticmethod
    def fenced_arguments(claim: Claim, asked: Arguments, fences: Fences, raisings: Sequence[Raising]) -> Arguments:
        """Return the arguments of `acquire_fenced`, from those of `acquisition`."""
        statements = [raising.statement for raising in raisings]
        resources = [resource for _, resource in fences]
        channel, ticket = asked[7:] or (None, None)
        patience = f"{FENCE_PATIENCE * 1000:.0f}ms"
        return (*asked[:6], channel, ticket, claim.holder, resources, statements, patience)

    def transfer_arguments(self, of: Claim, to: Claim) -> Arguments:
        """
        Return the arguments of `transfer`.

        Raises:
            BackendRefusedError: a text or number of *to* cannot be stored.
        """
        _check_storable(to)
        return of.name, of.owner, to.owner, _micros(to), to.label, self.hybrid, handed_over(to)

    def readers_arguments(self, name: str, claims: Sequence[Claim]) -> Arguments:
        """Return the arguments of `acquire_readers`, for claims of which each has a place in the line."""
        return (
            name,
            [claim.owner for claim in claims],
            [str(_micros(claim)) for claim in claims],
            [claim.label for claim in claims],
            self.hybrid,
        )

    def renew_arguments(self, claims: Sequence[Claim], patience_ms: int) -> Arguments:
        """Return the arguments of `renew`. One name that is not `storable` would fail the whole statement."""
        return (
            [claim.name for claim in claims],
            [claim.owner for claim in claims],
            [str(_micros(claim)) for claim in claims],
            patience_ms,
        )


def mode_arguments(mode: Mode) -> Arguments:
    """Return a mode as the tables have it, and the number of permits."""
    return (mode.word, mode.of if isinstance(mode, Permit) else None)


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
    """Read the answer to `acquisition`. A waiter tries again after *poll* seconds at the latest."""
    token, seconds_left, permit = _columns(row, 3)
    if token is None:
        retry_after = _seconds(seconds_left)
        return Busy(retry_after if poll is None else min(retry_after, poll))
    if permit is None or (isinstance(permit, int) and not isinstance(permit, bool) and permit >= 0):
        return Grant(_token(token), permit=permit)
    raise UnreadableRowError


def read_fence(error: Exception) -> tuple[int, list[Any]]:
    """Read which fence could not be raised, and why: a SQLSTATE, or the token that was granted and the fence."""
    number, *why = json.loads(str(getattr(error, "detail", "")))
    return number, why


def read_transfer(row: DriverRow | None, of: Claim) -> Grant | Renewal:
    """Read the answer to `transfer`."""
    token, permit, refusal = _columns(row, 3)
    if refusal is None:
        grant = read_outcome((token, None, permit), None)
        assert isinstance(grant, Grant)
        return grant
    if (renewal := _renewal(str(refusal), of)) is Renewal.UNKNOWN:
        raise UnreadableRowError
    return renewal


def read_readers(row: DriverRow | None, count: int, poll: float) -> list[Grant | Busy | None]:
    """Read the answer to `acquire_readers`: None for each reader that has to ask alone."""
    tokens, seconds_left = _columns(row, 2)
    if not isinstance(tokens, list) or len(tokens) != count:
        raise UnreadableRowError
    return [None if token == _NO_PLACE else read_outcome((token, seconds_left, None), poll) for token in tokens]


def read_renewals(row: DriverRow | None, claims: Sequence[Claim]) -> list[Renewal]:
    """Read the answer to `renew`: one character for each claim."""
    characters = _columns(row, 1)[0] or ""
    if isinstance(characters, str) and len(characters) == len(claims):
        return [_renewal(*pair) for pair in zip(characters, claims, strict=True)]
    raise UnreadableRowError


def read_release(row: DriverRow | None, claim: Claim) -> Renewal | None:
    """Read the answer to `release`: None if it has ended the owner's grant."""
    (outcome,) = read_renewals(row, [claim])
    if outcome is Renewal.UNKNOWN:
        raise UnreadableRowError
    return None if outcome is Renewal.RENEWED else outcome


def _renewal(character: str, claim: Claim) -> Renewal:
    """Read one character. Others share the name: that does not take a share over."""
    if character == _SHARED:
        return Renewal.REFUSED if claim.mode.shared else Renewal.TAKEN_OVER
    return _RENEWALS.get(character, Renewal.UNKNOWN)


def read_flag(row: DriverRow | None) -> bool:
    """Read the answer to `revoke`."""
    return _columns(row, 1)[0] is True


def read_reasons(row: DriverRow | None) -> list[str | None]:
    """Read the answer to `reasons`."""
    (found,) = _columns(row, 1)
    if not isinstance(found, list):
        raise UnreadableRowError
    return [None if reason is None else str(reason) for reason in found]


def read_listing(row: DriverRow | None) -> Listing:
    """Read the answer to `list`. The cursor is the name that was looked at last."""
    page, last = _columns(row, 2)
    if not isinstance(last, str | None):
        raise UnreadableRowError
    return Listing(_read_json(page, _holders), last)


def read_holders(row: DriverRow | None) -> list[Holder]:
    """Read the answer to `held`."""
    return _read_json(_columns(row, 1)[0], _holders)


def read_line(row: DriverRow | None) -> list[Waiting]:
    """Read the answer to `line`."""
    return _read_json(_columns(row, 1)[0], lambda line: [_waiting(found) for found in line])


def _read_json(text: object, read: Callable[[Sequence[dict[str, Any]]], list[T]]) -> list[T]:
    """Read a column of JSON, which is text to the driver; None is nothing."""
    try:
        return [] if text is None else read(json.loads(str(text)) or [])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnreadableRowError from error


def _holders(page: Sequence[dict[str, Any]]) -> list[Holder]:
    return [_holder(name, found) for name in page for found in name["holders"] or ()]


def _holder(name: dict[str, Any], found: dict[str, Any]) -> Holder:
    token, mode, permit, label = _token(found["token"]), _mode(found), found["permit"], found["label"]
    if not (isinstance(permit, int | None) and isinstance(label, str | None)):
        raise TypeError
    return Holder(
        name=name["name"],
        token=token,
        id=holder_of(found["owner"]),
        remaining=max(0.0, _seconds(float(found["left"]))),
        label=label,
        mode=mode,
        permit=permit,
        held_for=age_of(token, mode, int(name["now"])),
        waiters=int(name["waiters"]),
    )


def _waiting(found: dict[str, Any]) -> Waiting:
    if not isinstance(found["label"], str | None):
        raise TypeError
    since = None if found["waiting"] is None else max(0.0, _seconds(float(found["waiting"])))
    return Waiting(holder_of(found["owner"]), _mode(found), since, found["label"])


def _mode(found: dict[str, Any]) -> Mode:
    return mode_named(found["mode"], found["permits"])


def _columns(row: DriverRow | None, count: int) -> Sequence[object]:
    """Return the columns of an answer. A function with more or fewer belongs to another program."""
    found = () if row is None else tuple(row)
    if len(found) == count:
        return found
    raise UnreadableRowError


def _token(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_LIMIT:
        return value
    raise UnreadableRowError


def _seconds(value: object) -> float:
    if isinstance(value, float) and not math.isnan(value):
        return value
    raise UnreadableRowError
