"""
A task or a thread that waits for itself. The heartbeat renews every lease, so such a wait has no end.

    it holds the lock itself            refused
    its parent holds the lock (tasks)   a warning after one ttl: it may wait for its turn while its parent works on
    it runs an event loop (threads)     a warning after one ttl: the holder may be a task of that loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial

from fencing_sdk._engine.acquisition import Terms
from fencing_sdk._lease import Lease, WaitingThread, held_here, state_of, waiting_thread
from fencing_sdk._lease_state import Keeper, LeaseState
from fencing_sdk._values.claim import LOCK, Permit
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import UsageError, shown

_IN_COROUTINES = "in coroutines use the client of fencing_sdk.connect(): async with"

Doubt = Callable[[asyncio.Task[object]], str]
"""Returns why the task that waits may wait for ever. Empty when the reason has gone."""


def doubt_about(terms: Terms, keeper: Keeper) -> Doubt | None:
    """
    Return what makes this wait suspicious, or None.

    Raises:
        UsageError: this task holds the lock itself, or the thread that waits for it does.
    """
    thread = waiting_thread()
    if thread is not None and not (thread.inside or thread.runs_a_loop or held_here()):
        return None  # as for nearly every thread
    if not _may_wait_for_itself(terms):
        return None
    if thread is not None:
        for lease in tuple(thread.inside):
            if _is_on(lease, terms, keeper):
                raise _already_held(terms, lease, thread)
    for lease in map(state_of, held_here()):
        if lease.task is not None and _is_on(lease, terms, keeper):
            if lease.task is asyncio.current_task():
                raise _already_held(terms, lease, None)
            return partial(_child_of, lease, terms)
    return None if thread is None or not thread.runs_a_loop else partial(_stops_a_loop, thread, terms)


def _is_on(lease: LeaseState, terms: Terms, keeper: Keeper) -> bool:
    return lease.claim.name == terms.store_name and lease.keeper is keeper and lease.held


def _may_wait_for_itself(terms: Terms) -> bool:
    """Return whether a caller that holds the lock would wait for it without an end, or in vain."""
    if isinstance(terms.mode, Permit):
        return terms.wait is None  # else another permit may be free by then
    return terms.wait != 0


def _already_held(terms: Terms, lease: LeaseState, thread: WaitingThread | None) -> UsageError:
    """Return the error for a *thread*, or for this task, that waits for what it holds by *lease*."""
    name, held, wanted = shown(terms.name), lease.claim.mode, terms.mode
    caller = "task" if thread is None else "thread"
    if thread is not None and thread.runs_a_loop:
        return UsageError(
            f"this thread is inside a block of {name}, and would wait for it while its event loop stands still; "
            f"{_IN_COROUTINES}"
        )
    if isinstance(wanted, Permit) and isinstance(held, Permit):
        return UsageError(
            f"this {caller} holds a permit of {name} already, and would wait for another one for ever: {caller}s "
            "that each hold one and wait for one more wait for each other; pass wait="
        )
    if wanted == LOCK == held:
        hint = "" if thread is None else "; in a test, let another client or a plain handle hold it"
        return UsageError(f"this {caller} holds lock {name} already; locks are not reentrant{hint}")
    return UsageError(
        f"this {caller} holds {name} as a {held.word} already and would wait for itself as a {wanted.word}; "
        f"leave the {held.word} first, and look again at what was read when the {wanted.word} is held"
    )


async def hold_in_doubt(doubt: Doubt, terms: Terms, holding: Awaitable[Lease]) -> Lease:
    """Await the lease. After one ttl, log what makes the wait suspicious."""
    task = asyncio.current_task()
    assert task is not None  # an acquisition runs in a task
    timer = task.get_loop().call_later(terms.timing.ttl, _warn, doubt, task, context=Context())
    try:
        return await holding
    finally:
        timer.cancel()


def _warn(doubt: Doubt, waiter: asyncio.Task[object]) -> None:
    if reason := doubt(waiter):
        logger.warning("%s", reason)


def _child_of(lease: LeaseState, terms: Terms, waiter: asyncio.Task[object]) -> str:
    holder = lease.task
    if not lease.held or holder is None or holder.done():
        return ""
    return (
        f"task {shown(waiter.get_name())} has waited {terms.timing.ttl:.3g} s for lock {shown(terms.name)}, which task "
        f"{shown(holder.get_name())} holds and under which it was started; "
        "if that task waits for it, neither goes on: locks are not reentrant"
    )


def _stops_a_loop(thread: WaitingThread, terms: Terms, _: asyncio.Task[object]) -> str:
    return (
        f"thread {shown(thread.name)} has waited {terms.timing.ttl:.3g} s for lock {shown(terms.name)} and runs an "
        f"event loop, which stands still meanwhile; {_IN_COROUTINES}"
    )
