"""
Work that starts in several processes at the same time, and that one of them does.

    @locks.job("nightly", at_least_for=60, max_hold=1800)
    async def nightly() -> int: ...

    match await nightly():
        case Ran(value=rows): ...
        case Skipped(retry_after=seconds): ...

Each call asks for the lock once. A call that gets it runs the function, and the lock of a run that succeeded stays
taken until *at_least_for* seconds after the grant, in the store alone: a process whose clock is behind, and whose tick
comes when a short run has ended, finds it held. The idea is that of ShedLock's ``lockAtLeastFor``: there it defaults to
0 and keeps the lock of a run that failed, too; here it is required, and another process may make up for a failure.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from fencing_sdk._arguments import LockOptions
from fencing_sdk._lease import state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lock import Lock
from fencing_sdk._name_template import template_for_tasks
from fencing_sdk._values.claim import LockName, check_name, name_for
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.reports import label_of, say_kept
from fencing_sdk._values.timing import DEFAULT_TTL, MAX_TTL, Seconds, seconds
from fencing_sdk.errors import ConfigurationError, LeaseLostError, LockHeldError, shown
from fencing_sdk.events import JobEnded, JobOutcome

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ran(dict[str, object], Generic[R]):
    """
    The call got the lock, and the function returned.

    It is a dict, too: ``{"outcome": "ran", "value": ..., "token": ..., "held_for": ...}``. So a task queue that stores
    results as JSON stores it, if the function returns what JSON can carry.
    """

    value: R
    """What the function returned."""
    token: int
    """The number of the lease that it ran under, which is over."""
    held_for: float
    """Seconds from the grant to the end of the function."""

    def __post_init__(self) -> None:
        self.update(outcome=JobOutcome.RAN.value, value=self.value, token=self.token, held_for=self.held_for)


@dataclass(frozen=True, slots=True)
class Skipped(dict[str, object]):
    """
    The call found the lock held, and the function was not called.

    It is a dict, too: ``{"outcome": "skipped", "name": ..., "retry_after": ...}``.
    """

    name: str
    """The name of the lock."""
    retry_after: float | None
    """Seconds after which the lock may be free, or None where the store does not report it."""

    def __post_init__(self) -> None:
        self.update(outcome=JobOutcome.SKIPPED.value, name=self.name, retry_after=self.retry_after)


AtLeastOn: TypeAlias = Literal["success", "any"]
"""After which end of a run its lock stays taken: after a success, or also after a failure."""

JobFunction: TypeAlias = Callable[P, Coroutine[Any, Any, Ran[R] | Skipped]]
"""A decorated function: its call returns whether it ran."""


class Jobs:
    """Decorates functions with locks of one client."""

    def __init__(self, make_lock: Callable[..., Lock], observers: Observers, clock: Clock, label: str | None) -> None:
        self._make_lock = make_lock
        self._label = label
        self._observers = observers
        self._clock = clock

    def decorator(
        self, name: str, at_least_for: Seconds, at_least_on: AtLeastOn, options: LockOptions
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], JobFunction[P, R]]:
        """
        Check what is known at decoration, and return the decorator.

        Raises:
            ConfigurationError: a parameter cannot work.
        """
        checked = check_name(name)
        least = check_at_least_for(at_least_for)
        if at_least_on not in get_args(AtLeastOn):
            msg = f"at_least_on must be 'success' or 'any', not {shown(at_least_on)}"
            raise ConfigurationError(msg)
        if "wait" in options:
            msg = "a job takes no wait: a call that waited for another run would do the work of one tick twice"
            raise ConfigurationError(msg)
        self._make_lock("checked-when-decorated", **options)
        ttl = seconds(options.get("ttl", DEFAULT_TTL), "ttl")

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> JobFunction[P, R]:
            template = template_for_tasks(name, function, "job")
            self._observers.measure("job_made", LockName(checked, checked, "job"))

            @functools.wraps(function)
            async def once(*args: P.args, **kwargs: P.kwargs) -> Ran[R] | Skipped:
                label = say_kept(label_of(options.get("label"), self._label), least, ttl)
                described = options | {"label": label}
                lock = self._make_lock(name_for("job", template.fill(args, kwargs)), wait=0, **described)
                call = _JobCall(self._observers, self._clock, lock.name, least, at_least_on)
                return await call.run(lock, functools.partial(function, *args, **kwargs))

            return once

        return decorate


_LAST_MOMENT = 3.0
"""Seconds for which a run that is cancelled, or that ends the process, waits until the store keeps the lock."""


class _JobCall:
    """One call of a job, and the one event that reports its end."""

    def __init__(
        self, observers: Observers, clock: Clock, name: str, at_least_for: float, at_least_on: AtLeastOn
    ) -> None:
        self._observers = observers
        self._clock = clock
        self._name = name
        self._at_least_for = at_least_for
        self._kept_if_failed = at_least_on == "any"
        self._state: LeaseState | None = None
        self._held_for = 0.0
        self._lost = False

    async def run(self, lock: Lock, function: Callable[[], Coroutine[Any, Any, R]]) -> Ran[R] | Skipped:
        try:
            outcome = await self._run(lock, function)
        except BaseException as error:
            self._report(JobOutcome.LOST if self._is_loss(error) else JobOutcome.FAILED)
            raise
        self._report(JobOutcome.RAN if isinstance(outcome, Ran) else JobOutcome.SKIPPED)
        return outcome

    async def _run(self, lock: Lock, function: Callable[[], Coroutine[Any, Any, R]]) -> Ran[R] | Skipped:
        async with AsyncExitStack() as held:
            try:
                lease = await held.enter_async_context(lock)
            except LockHeldError as refusal:  # not one that the function raises about another lock
                return Skipped(lock.name, refusal.retry_after)
            state = self._state = state_of(lease)
            state.keep_for = self._at_least_for  # whatever ends the lease: the function itself, too
            try:
                value = await function()
            except BaseException as error:
                if not self._kept_if_failed:  # the end of the block releases the lock
                    self._held_for, state.keep_for = state.held_for, 0.0
                    raise
                if isinstance(error, GeneratorExit):  # nothing can be awaited, and its loop may be gone
                    self._held_for = state.held_for
                    _leave_behind(state)
                    raise
                await self._keep_after(error, state, within=None if isinstance(error, Exception) else _LAST_MOMENT)
                raise
            await self._keep(state)
            return Ran(value, state.number, self._held_for)
        raise AssertionError  # an exit stack of a lock takes no error back

    async def _keep_after(self, error: BaseException, state: LeaseState, *, within: float | None) -> None:
        """Park the lock of a run that failed. The error of the function leaves as it is."""
        try:
            await self._keep(state, within=within)
        except LeaseLostError as loss:
            self._lost = True
            if state.lost is None:  # else the end of the block says it
                error.add_note(f"fencing_sdk: {loss}")

    async def _keep(self, state: LeaseState, *, within: float | None = None) -> None:
        self._held_for = state.held_for
        try:
            await keep(state, self._at_least_for, within=within)
        except asyncio.CancelledError as error:
            self._lost = isinstance(error.__cause__, LeaseLostError)
            raise

    def _is_loss(self, error: BaseException) -> bool:
        state = self._state
        if state is None:
            return False
        mine = isinstance(error, LeaseLostError) and (error.name, error.token) == (state.name, state.number)
        return self._lost or mine or state.lost is not None

    def _report(self, outcome: JobOutcome) -> None:
        if self._observers:
            state, now = self._state, self._clock.now()
            self._observers.emit(
                JobEnded(
                    name=self._name,
                    at=now,
                    holder=None if state is None else state.holder,
                    outcome=outcome,
                    token=None if state is None else state.number,
                    held_for=self._held_for,
                )
            )


def _leave_behind(state: LeaseState) -> None:
    """Park the lock in the background, if its loop runs here."""
    try:
        here = asyncio.get_running_loop() is state.loop
    except RuntimeError:
        here = False
    if here:
        state.keeper.abandon(state)
    else:
        state.keep_for = 0.0


async def keep(state: LeaseState, at_least_for: float, *, within: float | None = None) -> None:
    """
    Leave a lock whose work has ended to its ttl, until *at_least_for* seconds after its grant, if that is not over yet.

    *within*: seconds to wait for the store, with further tries in the background; None: until the deadline.

    Raises:
        LeaseLostError: the store did not confirm it in time, or refused.
    """
    if state.held and state.held_for < at_least_for:
        await state.keeper.park(state, at_least_for, within)


def check_at_least_for(at_least_for: object) -> float:
    """
    Return the seconds for which a lock stays taken, counted from its grant: more than 0, and at most a day.

    Raises:
        ConfigurationError: they are out of this range.
    """
    return seconds(at_least_for, "at_least_for", high=MAX_TTL, above=True)
