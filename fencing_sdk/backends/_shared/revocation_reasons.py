"""Telling a holder why an operator took its grant away, by a store that keeps the reason for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import anyio

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk._values.scopes import move_on_after

__all__ = ["reason_for", "with_reasons"]

_LIMIT = 1.0
"""Seconds after which a holder is told of its loss without a reason."""
_TRIES = 3
_PAUSE = 0.05
"""Seconds between two of them."""
_ENDED = {Renewal.REFUSED, Renewal.TAKEN_OVER}

Reasons = Callable[[Sequence[Claim]], Awaitable[Sequence[str | None]]]
"""Asks the store, for claims whose grants have ended: why they were revoked, or None."""


async def with_reasons(
    claims: Sequence[Claim], renewals: Sequence[Renewal], reasons: Reasons
) -> Sequence[Renewal | Revoked]:
    """Look for the *reasons* of refused renewals. If the store does not answer, they stay refusals."""
    ended = [n for n, renewal in enumerate(renewals) if renewal is not Renewal.RENEWED and renewal in _ENDED]
    if not ended:
        return renewals
    found = await _asked(reasons, [claims[index] for index in ended])
    told: list[Renewal | Revoked] = list(renewals)
    for index, reason in zip(ended, found, strict=True):
        if reason is not None:
            told[index] = Revoked(reason)
    return told


async def reason_for(claim: Claim, reasons: Reasons) -> str:
    """Look for the reason of one loss; "" if there is none, or the store does not answer."""
    (reason,) = await _asked(reasons, [claim])
    return reason or ""


async def _asked(reasons: Reasons, claims: Sequence[Claim]) -> Sequence[str | None]:
    with move_on_after(_LIMIT):
        for _ in range(_TRIES):
            # The loss is known; that there is no reason to tell changes nothing.
            with contextlib.suppress(Exception):
                return await reasons(claims)
            await anyio.sleep(_PAUSE)  # the connection may have broken under the question
    return [None] * len(claims)
