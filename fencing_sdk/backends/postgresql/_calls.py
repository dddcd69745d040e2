"""What the server is asked, and what its answers mean: SQL and microseconds there, values here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fencing_sdk._values.claim import TOKEN_LIMIT, Claim, Grant, Held, Holder, Renewal, holder_of
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends.postgresql._driver import Row
from fencing_sdk.backends.postgresql._schema import quoted
from fencing_sdk.backends.postgresql._translation import BACKEND, UnreadableError
from fencing_sdk.errors import BackendRefusedError

PATIENCE_MS = 100
"""Milliseconds that a renewal waits for rows that somebody else keeps locked."""

_OUTCOMES = {"1": Renewal.RENEWED, "0": Renewal.REFUSED, "x": Renewal.TAKEN_OVER}
_LARGEST = 2**53

Arguments = tuple[object, ...]


class Calls:
    """The statements for one schema, each one call of a function in it."""

    def __init__(self, schema: str, *, hybrid: bool) -> None:
        where = quoted(schema)
        self._hybrid = hybrid
        self.acquire = f"SELECT * FROM {where}.fencing_acquire_v1($1, $2, $3, $4, $5, $6, $7)"  # noqa: S608
        self.renew = f"SELECT {where}.fencing_renew_v1($1, $2, $3, $4)"
        self.release = f"SELECT {where}.fencing_release_v1($1, $2)"
        self.join = f"SELECT {where}.fencing_join_v1($1, $2, $3, $4)"
        self.leave = f"SELECT {where}.fencing_leave_v1($1, $2)"
        self.sweep = f"SELECT {where}.fencing_sweep_v1($1)"
        self.notify = "SELECT pg_catalog.pg_notify($1, $2)"
        self.inspect = f"SELECT * FROM {where}.fencing_inspect_v1($1)"  # noqa: S608

    def acquisition(self, claim: Claim, channel: str | None, word: str | None) -> Arguments:
        """
        The arguments of `acquire`; a channel is given by one who stands in line.

        Raises:
            BackendRefusedError: a text or number of the claim cannot be stored.
        """
        if not (_storable(claim.name) and (claim.metadata is None or _storable(claim.metadata))):
            raise BackendRefusedError(BACKEND, "acquire", "a name or metadata has a NUL or a lone surrogate; escape it")
        return (claim.name, claim.owner, _micros(claim), claim.metadata, self._hybrid, channel, word)

    def renewal(self, claims: Sequence[Claim], patience: int) -> Arguments:
        """The arguments of `renew`; of every claim that could be granted at all."""
        return (
            [claim.name for claim in claims],
            [claim.owner for claim in claims],
            [str(_micros(claim)) for claim in claims],
            patience,
        )


def _storable(text: str) -> bool:
    """Whether PostgreSQL can store *text*, as far as that is the same for every encoding."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def renewable(claims: Sequence[Claim]) -> list[int]:
    """The places of the claims that can be asked about: one that cannot must not cost the others theirs."""
    return [place for place, claim in enumerate(claims) if _storable(claim.name)]


def _micros(claim: Claim) -> int:
    """Round up: the store may keep a grant for longer than was asked, never for less."""
    if not claim.ttl * 1e6 < _LARGEST:
        raise BackendRefusedError(BACKEND, "acquire", "the ttl is too large to be stored")
    return math.ceil(claim.ttl * 1e6)


def outcome(row: Row | None, most: float | None) -> Grant | Held:
    """
    Read the answer to `Calls.acquire`; one who stands in line tries again after *most* seconds.

    Raises:
        UnreadableError: it is none, and whether something was granted is not known.
    """
    token, left = _columns(row, 2)
    if token is not None:
        return Grant(_token(token))
    left = _seconds(left)
    return Held(left if most is None else min(left, most))


def renewals(row: Row | None, count: int) -> list[Renewal]:
    """
    Read the answer to `Calls.renew`.

    Raises:
        UnreadableError: it is none.
    """
    signs = _columns(row, 1)[0] or ""
    if isinstance(signs, str) and len(signs) == count:
        return [_OUTCOMES.get(sign, Renewal.UNKNOWN) for sign in signs]
    msg = f"not {count} signs"
    raise UnreadableError(msg)


def holder(name: str, row: Row | None) -> Holder | None:
    """
    Read who holds *name*.

    Raises:
        UnreadableError: the answer does not tell.
    """
    if row is None:
        return None
    owner, token, left, metadata = _columns(row, 4)
    if owner is None:
        return None
    if isinstance(owner, str) and isinstance(metadata, str | None):
        return Holder(name, _token(token), holder_of(owner), max(0.0, _seconds(left)), metadata)
    msg = "not a holder"
    raise UnreadableError(msg)


def _columns(row: Row | None, count: int) -> Sequence[object]:
    """The columns of an answer; one with more or fewer is that of another program's function."""
    columns = () if row is None else tuple(row)
    if len(columns) == count:
        return columns
    msg = f"not {count} columns"
    raise UnreadableError(msg)


def _token(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_LIMIT:
        return value
    msg = "not a token"
    raise UnreadableError(msg)


def _seconds(value: object) -> float:
    if isinstance(value, float) and not math.isnan(value):
        return value
    msg = "not a number of seconds"
    raise UnreadableError(msg)


def poll(*, deaf: bool) -> float:
    """Seconds after which one who stands in line tries again although nobody woke it."""
    return LINE_POLL / 4 if deaf else LINE_POLL
