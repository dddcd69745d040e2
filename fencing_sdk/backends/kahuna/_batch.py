"""Many renewals: Kahuna takes one claim in a request, so a bounded number of requests run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.errors import BackendError

__all__ = ["renew_each"]

_PATIENCE = 1 / 8
"""Part of a ttl after which those that have an answer wait for the others no longer: more than half an interval."""


async def renew_each(
    claims: Sequence[Claim], renew: Callable[[Claim], Awaitable[Renewal]], *, width: int
) -> Sequence[Renewal]:
    """
    Renew every claim by *renew*, at most *width* at a time; one that fails stops no other.

    Raises:
        BackendError: no claim has an answer; it is the error of the first one.
    """
    outcomes: dict[Claim, Renewal] = {}
    errors: list[BackendError] = []
    distinct = dict.fromkeys(claims)
    waiting = iter(distinct)  # shared: each worker takes the next one

    async def work(waiting: Iterator[Claim]) -> None:
        for claim in waiting:
            try:
                outcomes[claim] = await renew(claim)
            except BackendError as error:
                errors.append(error)

    loop = asyncio.get_running_loop()
    workers = [loop.create_task(work(waiting)) for _ in range(min(width, len(distinct)))]
    try:
        await asyncio.wait(workers, timeout=_PATIENCE * min(claim.ttl for claim in distinct))
        if not outcomes:  # nothing to be lost by waiting on
            await asyncio.wait(workers)
    finally:
        for worker in workers:
            worker.cancel()
        ends = await asyncio.gather(*workers, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    if errors and not outcomes:
        raise errors[0]
    return [outcomes.get(claim, Renewal.UNKNOWN) for claim in claims]
