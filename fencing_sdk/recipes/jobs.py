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
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from fencing_sdk._arguments import LockOptions
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lock import Lock
from fencing_sdk._name_template import NameTemplate, template_for_tasks
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
class Ran(Generic[R]):
    """The call got the lock, and the function returned."""

    value: R
    """The return value of the function."""
    token: int
    """The number of the lease that it ran under, which is over."""
    held_for: float
    """Seconds from the grant to the end of the function."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The call found the lock held, and the function was not called."""

    name: str
    """The name of the lock."""
    retry_after: float | None
    """Seconds after which the lock may be free, or None where the store does not report it."""


AtLeastOn: TypeAlias = Literal["success", "any"]
"""After which end of a run its lock stays taken: after a success, or also after a failure."""

JobFunction: TypeAlias = Callable[P, Coroutine[Any, Any, Ran[R] | Skipped]]
"""A decorated function: its call returns whether it ran."""


class Job:
    """
    A job, described: what its calls share.

    Raises:
        ConfigurationError: a parameter cannot work.
    """

    def __init__(
        self,
        make_lock: Callable[..., Lock],
        observers: Observers,
        clock: Clock,
        *,
        name: str,
        at_least_for: Seconds,
        at_least_on: AtLeastOn,
        label: str | None,
        options: LockOptions,
    ) -> None:
        self.name = check_name(name)
        self.observers = observers
        self.clock = clock
        self.at_least_for = check_at_least_for(at_least_for)
        if at_least_on not in get_args(AtLeastOn):
            msg = f"at_least_on must be 'success' or 'any', not {shown(at_least_on)}"
            raise ConfigurationError(msg)
        self.kept_if_failed = at_least_on == "any"
        if "wait" in options:
            msg = "a job takes no wait: a call that waited for another run would do the work of one tick twice"
            raise ConfigurationError(msg)
        make_lock("checked-when-decorated", **options)
        self._make_lock = make_lock
        self._label = label
        self._options = options

    def decorate(self, function: Callable[P, Coroutine[Any, Any, R]]) -> JobFunction[P, R]:
        """
        Decorate a coroutine function.

        Raises:
            ConfigurationError: it is none, or its parameters do not fit the name.
        """
        template = template_for_tasks(self.name, function, "job")
        self.report_made()

        @functools.wraps(function)
        async def once(*args: P.args, **kwargs: P.kwargs) -> Ran[R] | Skipped:
            return await self.call(template, args, kwargs).run(functools.partial(function, *args, **kwargs))

        return once

    def report_made(self) -> None:
        """Report a decorated function, whose runs are counted from 0."""
        self.observers.measure("job_made", LockName(self.name, self.name, "job"))

    def call(self, template: NameTemplate, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> JobCall:
        """Describe one call."""
        ttl = seconds(self._options.get("ttl", DEFAULT_TTL), "ttl")
        label = say_kept(label_of(self._options.get("label"), self._label), self.at_least_for, ttl)
        described = self._options | {"label": label}
        return JobCall(self, self._make_lock(name_for("job", template.fill(args, kwargs)), wait=0, **described))


_LAST_MOMENT = 3.0
"""Seconds for which a run that is cancelled, or that ends the process, waits until the store keeps the lock."""


class JobCall:
    """
    One call of a job, and the one event that reports its end.

    A task calls `run`. A thread takes the lock by `acquire`, ends its body by `end` or `park_failed`, and reports.
    """

    def __init__(self, job: Job, lock: Lock) -> None:
        self.name = lock.name
        self.state: LeaseState | None = None
        """The lease under which the function runs, or None while there is none."""
        self._job = job
        self._lock = lock
        self._held_for = 0.0
        self._lost = False

    async def run(self, function: Callable[[], Coroutine[Any, Any, R]]) -> Ran[R] | Skipped:
        """Run *function* under the lock, in this task."""
        try:
            async with self._lock as lease:
                self._begin(state_of(lease))
                try:
                    value = await function()
                except GeneratorExit:  # nothing can be awaited, and its loop may be gone
                    if (state := self._fail()).keep_for:
                        _leave_behind(state)
                    raise
                except BaseException as error:
                    await self.park_failed(error)
                    raise
                await self.park()
        except BaseException as error:
            self.report(error)
            if self.state is None and isinstance(error, LockHeldError):
                return Skipped(self.name, error.retry_after)
            raise
        self.report()
        return self.ran(value)

    async def acquire(self, *, wait: EllipsisType = ...) -> Lease:
        """Take the lock for a thread. A call that fails here is reported."""
        try:
            lease = await self._lock.acquire(wait=wait)
        except BaseException as error:
            self.report(error)
            raise
        self._begin(state_of(lease))
        return lease

    def _begin(self, state: LeaseState) -> None:
        self.state = state
        state.keep_for = self._job.at_least_for  # whatever ends the lease: the function itself, too

    def end(self) -> LeaseState:
        """Note that the function has ended. The release of the lease parks the lock."""
        state = self.state
        assert state is not None  # the function has run
        self._held_for = state.held_for
        return state

    def _fail(self) -> LeaseState:
        """Note that the function has failed, and how long its lock stays taken."""
        state = self.end()
        if not self._job.kept_if_failed:
            state.keep_for = 0.0
        return state

    async def park(self, *, within: float | None = None) -> None:
        """Leave the lock to its ttl, until the time of the job is over."""
        state = self.end()
        try:
            await keep(state, self._job.at_least_for, within=within)
        except asyncio.CancelledError as error:
            self._lost = isinstance(error.__cause__, LeaseLostError)
            raise

    async def park_failed(self, error: BaseException) -> None:
        """Park the lock of a run that failed, if the job asks for that. The *error* of the function leaves as it is."""
        if not (state := self._fail()).keep_for:
            return
        try:
            await self.park(within=None if isinstance(error, Exception) else _LAST_MOMENT)
        except LeaseLostError as loss:
            self._lost = True
            if state.lost is None:  # else the end of the block says it
                error.add_note(f"fencing_sdk: {loss}")

    def ran(self, value: R) -> Ran[R]:
        """Return the outcome of a run whose function returned *value*."""
        assert self.state is not None  # the function has run
        return Ran(value, self.state.number, self._held_for)

    def report(self, error: BaseException | None = None) -> None:
        """Report the end of the call, which *error* leaves."""
        state, outcome = self.state, JobOutcome.RAN
        if state is None:
            outcome = JobOutcome.SKIPPED if isinstance(error, LockHeldError) else JobOutcome.FAILED
        elif error is not None:
            mine = isinstance(error, LeaseLostError) and (error.name, error.token) == (state.name, state.number)
            outcome = JobOutcome.LOST if self._lost or mine or state.lost is not None else JobOutcome.FAILED
        if observers := self._job.observers:
            observers.emit(
                JobEnded(
                    name=self.name,
                    at=self._job.clock.now(),
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
