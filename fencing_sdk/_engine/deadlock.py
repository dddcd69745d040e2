"""
Tasks that wait for themselves: for a lock that they hold, or that the task holds which waits for them.

The heartbeat renews every lease, so such a wait has no end. The first case is refused. The second looks like a task
that waits for its turn while its parent works on, so it is a warning, after one ttl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context

from fencing_sdk._current import held_here
from fencing_sdk._engine.acquisition import Terms
from fencing_sdk._engine.lease_state import Keeper, LeaseState
from fencing_sdk._lease import state_of
from fencing_sdk._values.claim import LOCK, Permit
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import UsageError, shown


def held_above(terms: Terms, keeper: Keeper) -> LeaseState | None:
    """
    Return the lease on this lock under which the task that waits was started; None if there is none.

    Raises:
        UsageError: this task holds the lock itself.
    """
    if terms.wait == 0:
        return None
    if isinstance(terms.mode, Permit) and terms.wait is not None:
        return None  # another permit may be free by then
    for lease in map(state_of, held_here()):
        if lease.claim.name == terms.store_name and lease.keeper is keeper and lease.task is not None and lease.held:
            if lease.task is asyncio.current_task():
                raise UsageError(_already_held(terms, lease))
            return lease
    return None


def _already_held(terms: Terms, lease: LeaseState) -> str:
    name, held, wanted = shown(terms.name), lease.claim.mode, terms.mode
    if isinstance(wanted, Permit):
        return (
            f"this task holds a permit of {name} already, and would wait for another one without an end: tasks that "
            "each hold one and wait for one more wait for each other; pass wait="
        )
    if wanted == LOCK:
        return f"this task holds lock {name} already; locks are not reentrant"
    return (
        f"this task holds {name} as a {held.word} already and would wait for itself as a {wanted.word}; "
        f"leave the {held.word} first, and look again at what was read when the {wanted.word} is held"
    )


@contextmanager
def warned(terms: Terms, above: LeaseState) -> Iterator[None]:
    """Log a warning if the body still waits after one ttl for the lock that is held *above* it."""
    task = asyncio.current_task()
    assert task is not None  # an acquisition runs in a task
    timer = task.get_loop().call_later(terms.timing.ttl, _warn, terms, task, above, context=Context())
    try:
        yield
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
