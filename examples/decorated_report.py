"""
A decorated coroutine with back-off: two workers want to build the same report, one at a time.

The lock's name is filled from the call's arguments, so different reports do not wait for each other. The store here
could wake its waiters; the back-off is for the moments when it cannot, and for a store that is away.

Run it: uv run python examples/decorated_report.py
"""

import asyncio
from datetime import timedelta

from tenacity import wait_exponential, wait_random

from fencing_sdk import AcquireTimeoutError, connect, current_token
from fencing_sdk.events import Event

story: list[str] = []


def show(event: Event) -> None:
    """An observer: receives every event as a frozen value."""
    if event.kind in {"acquired", "renewed", "released"}:
        print(f"  {event.kind:9} {event.name}")
        story.append(f"{event.kind} {event.name}")


locks = connect("memory://", observers=[show], tokens="counter")  # within one process; several need a store


@locks.locking(
    "report/{report_id}",
    ttl=timedelta(seconds=10),
    heartbeat_interval=0.2,
    wait=10,
    backoff=wait_exponential(multiplier=0.05, max=1) + wait_random(0, 0.05),
)
async def build_report(report_id: int, *, seconds: float = 0.3) -> int:
    """Pretend to work for longer than one heartbeat; return the token that the work was done under."""
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
    return current_token()


@locks.locking("report/{report_id}", wait=0.1)
async def peek(report_id: int) -> None:
    """Give up soon: another worker is building this report."""


async def main() -> None:
    async with locks:
        first, second, other = await asyncio.gather(build_report(7), build_report(7), build_report(8))
        print(f"report 7 was built under token {first}, and again under {second}; report 8 under {other}")
        assert first != second

        long_build = asyncio.create_task(build_report(9, seconds=1))  # longer than a heartbeat: it is renewed
        await asyncio.sleep(0.1)
        try:
            await peek(9)
        except AcquireTimeoutError as error:
            print(error)
        await long_build
    assert story.count("renewed report/9") >= 1
    assert story.count("released report/7") == 2


asyncio.run(main())
