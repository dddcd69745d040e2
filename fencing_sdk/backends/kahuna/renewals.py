"""Many renewals. A request to Kahuna renews one claim, so a bounded number of requests run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.errors import BackendError

__all__ = ["renew_each"]

_WAIT_PART = 1 / 8
"""Part of a ttl after which renewals that are done wait no longer for the others: more than half an interval."""


async def renew_each(
    claims: Sequence[Claim], renew: Callable[[Claim], Awaitable[Renewal]], *, width: int
) -> Sequence[Renewal]:
    """
    Renew every claim by *renew*, at most *width* at a time. A renewal that fails stops no other.

    Raises:
        BackendError: no renewal has an outcome; this is the first error.
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
        await asyncio.wait(workers, timeout=_WAIT_PART * min(claim.ttl for claim in distinct))
        if not outcomes:  # there is no outcome to deliver in time
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
