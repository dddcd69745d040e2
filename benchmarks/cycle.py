"""Our two ways to acquire and release a free lock, beside what a store's own driver does for the same."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.table import Operation, Row, compare, compared
from fencing_sdk import LockClient
from fencing_sdk.abc import Backend, Claim


async def cycle(backend: Backend, beside: Mapping[str, Operation], *, times: int, reach: float) -> list[Row]:
    """
    Compare them in one run, and close the *backend*.

    Args:
        backend: Of the store.

        beside: What the bare driver does, by its name. All others are compared with the first.

        times: How often each is run in a round.

        reach: How many times as long as the first ``async with lock`` may take.
    """

    async def pair() -> None:
        claim = Claim("bench", 60.0)
        await backend.draw(claim, only_if_it_holds=True)
        await backend.give_back(claim)

    async with LockClient(backend) as locks:
        held = locks.lock("bench scoped")

        async def scoped() -> None:
            async with held:
                pass

        contestants = {**beside, "backend.draw, backend.give_back": pair, "async with lock": scoped}
        return compared(await compare(contestants, times=times), reach={"async with lock": reach})
