"""
A task that waits for itself: for a lock that it holds, or that its parent holds while the parent awaits it.

The heartbeat renews every lease, so such a wait has no end. The first case is refused. The second looks like a task
that waits for its turn while its parent works on, so it is a warning, after one ttl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import Context

from fencing_sdk._current_lease import held_here
from fencing_sdk._engine.lease_state import Keeper, LeaseState
from fencing_sdk._engine.terms import Terms
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._values.claim import LOCK, Permit
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import UsageError, shown


def held_above(terms: Terms, keeper: Keeper) -> LeaseState | None:
    """
    Return the lease on this lock under which the task that waits was started; None if there is none.

    Raises:
        UsageError: this task holds the lock itself.
    """
    if not may_wait_for_itself(terms):
        return None
    for lease in map(state_of, held_here()):
        if lease.claim.name == terms.store_name and lease.keeper is keeper and lease.task is not None and lease.held:
            if lease.task is asyncio.current_task():
                raise already_held(terms, lease, "task")
            return lease
    return None


def may_wait_for_itself(terms: Terms) -> bool:
    """Whether a caller that holds the lock would wait for it without an end, or in vain."""
    if isinstance(terms.mode, Permit):
        return terms.wait is None  # else another permit may be free by then
    return terms.wait != 0


def already_held(terms: Terms, lease: LeaseState, caller: str) -> UsageError:
    """Return the error for a *caller*, a task or a thread, that waits for what it holds by *lease*."""
    name, held, wanted = shown(terms.name), lease.claim.mode, terms.mode
    if isinstance(wanted, Permit) and isinstance(held, Permit):
        return UsageError(
            f"this {caller} holds a permit of {name} already, and would wait for another one without an end: {caller}s "
            "that each hold one and wait for one more wait for each other; pass wait="
        )
    if wanted == LOCK == held:
        return UsageError(f"this {caller} holds lock {name} already; locks are not reentrant")
    return UsageError(
        f"this {caller} holds {name} as a {held.word} already and would wait for itself as a {wanted.word}; "
        f"leave the {held.word} first, and look again at what was read when the {wanted.word} is held"
    )


async def hold_below(above: LeaseState, terms: Terms, holding: Awaitable[Lease]) -> Lease:
    """Await the lease. After one ttl, log a warning that a task above holds the lock."""
    task = asyncio.current_task()
    assert task is not None  # an acquisition runs in a task
    timer = task.get_loop().call_later(terms.timing.ttl, _warn, terms, task, above, context=Context())
    try:
        return await holding
    finally:
        timer.cancel()


def _warn(terms: Terms, waiter: asyncio.Task[object], lease: LeaseState) -> None:
    holder = lease.task
    if lease.held and holder is not None and not holder.done():
        logger.warning(
            "task %s has waited %.3g s for lock %s, which task %s holds and under which it was started; "
            "if that task waits for it, neither goes on: locks are not reentrant",
            shown(waiter.get_name()),
            terms.timing.ttl,
            shown(terms.name),
            shown(holder.get_name()),
        )
