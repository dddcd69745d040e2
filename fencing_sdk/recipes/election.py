"""
One leader among many processes, for one term after the other.

    async for term in locks.election("scheduler"):
        async with term as lease:           # cancelled when the lead is lost; the loop stands again
            await run_scheduler(lease.token)

A term is a lease of the lock *name*; the loop is what stands for it, term after term:

    stand      wait in line for the lock; an outage of the store only delays it, a refusal leaves the loop
    lead       the body runs under the lease, like any block under a lock
    end        the lease was lost: the term swallows this one error, and the loop stands again
               the body returned: the lock is released, and the loop stands again, behind those who wait
               resigned, or the client drains: the body is cancelled, and the lock released when it has ended

Two lines are needed. An iterator that owned the cancel scope could not work: the loss would leave the ``for`` as a
cancellation that no block takes back, and after ``break`` a scope would stay open that later cancels other work.

The block of a term is that of a lock, with a scope of its own inside. The lock's scope cancels the body when the lease
is lost. The inner one cancels it when the term is to end although the lease is held, so that the body cleans up under a
lease that is still renewed, and the lock is released after that.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum, unique
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.lease_scope import PlainScope, paced_scope
from fencing_sdk._lease import AnyLease, Lease, state_of
from fencing_sdk._lock import Lock, enter_with, telling
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import BackendUnavailableError, DrainingError, LeaseLostError, UsageError, shown

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_PAUSE = 0.1
_LAST_PAUSE = 5.0
"""Seconds between two tries while the store does not answer; each pause is twice the one before."""
_AFTER_RESIGNING = 1.5
"""Seconds before a leader that has resigned stands again: longer than a waiter sleeps that the store cannot wake."""


@unique
class ElectionStanding(StrEnum):
    """Standing of this process in an election. The value is the word for health endpoints and metrics."""

    IDLE = "idle"
    """No loop runs here."""

    CANDIDATE = "candidate"
    """Another process leads, or no process does yet; this one waits in line."""

    UNAVAILABLE = "unavailable"
    """The store has not answered for a ttl; this process goes on asking."""

    LEADING = "leading"
    """The lead is here. The clock was looked at now."""

    ENDING = "ending"
    """The term is over, and its body has not ended yet."""


class Election(Uncopied):
    """
    An election, described. Nothing is sent until ``async for`` stands in it. Made by `LockClient.election`.

    The loop ends in order when the client drains. It raises every error but an outage: `BackendRefusedError`,
    `StaleTokenError` and errors of guards, `UsageError` where the client is closed, and the errors of the body.
    """

    __slots__ = ("_inspect", "_lock", "_state")

    def __init__(
        self,
        lock: Callable[[], Lock],
        engine: Callable[[], Engine],
        inspect: Callable[[], Awaitable[Holder | None]],
        finish_within: float,
        elections: WeakSet[ElectionState],
    ) -> None:
        self._lock = lock
        self._inspect = inspect
        self._state = ElectionState(lock().name, engine, finish_within)
        elections.add(self._state)

    @property
    def name(self) -> str:
        """The name of the election, without the client's namespace."""
        return self._state.name

    @property
    def leading(self) -> bool:
        """True if this process leads at this moment, by the clock. May be read from any thread."""
        return self._state.leading

    @property
    def standing(self) -> ElectionStanding:
        """Standing of this process, for health endpoints. May be read from any thread."""
        here = self._state.here
        terms = tuple(here.terms)
        if any(term.lease.held and not term.stopped for term in terms):
            return ElectionStanding.LEADING
        if terms:
            return ElectionStanding.ENDING
        if here.candidacies:
            return ElectionStanding.UNAVAILABLE if here.silent else ElectionStanding.CANDIDATE
        return ElectionStanding.IDLE

    def __repr__(self) -> str:
        return f"<Election {shown(self.name)} {self.standing.value}>"

    async def leader(self) -> Holder | None:
        """
        Return the leader, here or elsewhere, or None. An answer may be outdated when it arrives.

        ``leader.label`` is the ``label=`` of the leader's election, or of its client.

        Raises:
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        return await self._inspect()

    def resign(self) -> None:
        """
        End the term of this process, if it leads: its body is cancelled, and the lock is released after it has ended.

        The loop stands again then, behind those who wait. To leave the election, ``break`` out of the loop.

        Raises:
            UsageError: the client is not open.
        """
        self._state.engine()
        for term in tuple(self._state.here.terms):
            term.stop()

    def __aiter__(self) -> AsyncIterator[ElectionTerm]:
        return candidacy_of(self)


def candidacy_of(election: Election) -> Candidacy:
    """Return a loop that stands in *election*. For this package alone."""
    state, lock = election._state, election._lock()  # noqa: SLF001  (the one door to it)
    return Candidacy(state, telling(lock, state.heard))


class Candidacy:
    """One loop that stands in an election."""

    __slots__ = ("_block", "_lock", "election")

    def __init__(self, election: ElectionState, lock: Lock) -> None:
        self.election = election
        self._lock = lock
        self._block: TermBlock | None = None

    def __aiter__(self) -> Candidacy:
        return self

    def __del__(self, interpreter_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if interpreter_ends():
            return
        block: TermBlock | None = getattr(self, "_block", None)  # without, where a signal came while it was made
        if block is not None:
            block.left_behind()

    async def __anext__(self) -> ElectionTerm:
        resigned = False
        if self._block is not None:
            resigned = self._block.stopped
            await self._block.check_entered()
            self._block = None
        lease = await self.stand(resigned=resigned)
        if lease is None:
            raise StopAsyncIteration
        self._block = TermBlock(self.election, self._lock, lease)
        return ElectionTerm(self._block)

    async def stand(self, *, resigned: bool) -> Lease | None:
        """Wait for the lead, behind others if this process *resigned*; return None when the client drains."""
        here, pause = self.election.here, _FIRST_PAUSE
        here.candidacies.add(self)
        try:
            if resigned:
                await self._pause(_AFTER_RESIGNING)
            while not self.election.engine().draining.begun:
                try:
                    return await self._lock.acquire()
                except DrainingError:
                    break
                except (BackendUnavailableError, LeaseLostError) as error:  # an outage is ridden out
                    here.silent = isinstance(error, BackendUnavailableError)
                    logger.warning("election %s: %s; trying again", shown(self.election.name), error)
                await self._pause(pause * JITTER.uniform(0.5, 1.0))
                pause = min(2 * pause, _LAST_PAUSE)
        finally:
            here.candidacies.discard(self)
            here.silent = False
        return None

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not into the draining of the client."""
        woken = asyncio.Event()
        forget = self.election.engine().draining.on_begin(woken.set)
        timer = asyncio.get_running_loop().call_later(seconds, woken.set, context=Context())
        try:
            await woken.wait()
        finally:
            timer.cancel()
            forget()


def as_leader(
    function: Callable[P, Coroutine[Any, Any, R]], election_of: Callable[[tuple[Any, ...], dict[str, Any]], Election]
) -> Callable[P, Coroutine[Any, Any, R | None]]:
    """Run *function* as the leader of the election that the arguments of each call name."""

    @functools.wraps(function)
    async def elected(*args: P.args, **kwargs: P.kwargs) -> R | None:
        async for term in election_of(args, kwargs):
            returned: list[R] = []
            async with term as lease:
                returned.append(await function(*args, **kwargs))
                lease.check()  # a function that ended too late was not covered: another term
            if returned and lease.lost_reason is None:  # its release may have found that, too
                return returned[0]
        return None

    return elected


@dataclass(slots=True)
class ElectionRoles:
    """The terms and the candidates of one process in an election."""

    terms: dict[TermLife[Any], None] = field(default_factory=dict)
    """The blocks whose lock was not released."""
    candidacies: set[object] = field(default_factory=set)
    """Loops that wait for the lead."""
    silent: bool = False
    """True if the store has not answered them for a ttl."""


class ElectionState:
    """State that an election, its loops and their terms share."""

    __slots__ = ("__weakref__", "_roles", "engine", "finish_within", "name")

    def __init__(self, name: str, engine: Callable[[], Engine], finish_within: float) -> None:
        self.name = name
        self.engine = engine
        self.finish_within = finish_within
        """Seconds for which a body may go on when the client drains."""
        self._roles: dict[int, ElectionRoles] = {}

    @property
    def here(self) -> ElectionRoles:
        """The roles of this process: a forked child has none of its parent's."""
        roles = self._roles.get(os.getpid())
        return self._roles.setdefault(os.getpid(), ElectionRoles()) if roles is None else roles

    def heard(self) -> None:
        """Note that the store has answered a candidate: another process leads."""
        self.here.silent = False

    @property
    def leading(self) -> bool:
        """True if this process leads at this moment, by the clock."""
        return any(term.lease.held for term in tuple(self.here.terms))


L = TypeVar("L", bound=AnyLease)


class TermLife(Generic[L]):
    """The life of a term of a task or a thread: it begins, is entered at once or abandoned, and ends."""

    __slots__ = ("_abandoned", "_pid", "_statement", "election", "entered", "lease", "stopped")

    def __init__(self, election: ElectionState, lease: L, statement: str) -> None:
        self._pid = os.getpid()
        self._statement = statement  # by which the body is written: ``async with`` or ``with``
        self._abandoned: str | None = None  # when it should have been entered, once its lock is released
        self.election = election
        self.lease = lease
        self.entered = False
        self.stopped = False
        """True if the body has to end although the lease is held."""

    @property
    def over(self) -> bool:
        """True if the body is to end: the lead was lost, the election resigned, or the client drains."""
        return self.stopped or not self.lease.held or self.election.engine().draining.begun

    def begin(self) -> None:
        """Make it a term of the election, which refers to it from now on. The caller ends it."""
        self.election.here.terms[self] = None

    def end(self) -> None:
        """Make it a term of the election no longer. Idempotent."""
        self.election.here.terms.pop(self, None)

    def stop(self) -> None:
        """Ask the body to end. The lease is held, and renewed, until it has."""
        self.stopped = True

    def check_enterable(self) -> None:
        """
        Do nothing if the block may begin now.

        Raises:
            UsageError: it has begun before, its lease was released, or it is the term of a parent process.
        """
        name = shown(self.election.name)
        if self._inherited:
            msg = (
                f"this term of election {name} was begun before a fork, and belongs to the parent; "
                "go on with the loop in the child"
            )
            raise UsageError(msg)
        if self._abandoned is not None:
            raise self._not_entered(self._abandoned)
        if self.entered or self not in self.election.here.terms:
            msg = f"a term of election {name} is entered once, and in its loop"
            raise UsageError(msg)

    def abandon(self, when: str) -> bool:
        """End a term that was not entered by then; return whether the caller is to release its lock."""
        if self.entered or self._inherited or self._abandoned is not None:
            return False
        self.end()
        self._abandoned = when
        name = shown(self.election.name)
        logger.warning("a term of election %s was not entered %s; its lock is released", name, when)
        return True

    def refuse_unentered(self) -> UsageError | None:
        """
        End a term that was not entered when its loop goes on; return the error, as its body would run without the lead.

        None if it was entered. Else the caller releases the lock.
        """
        if self.entered or self._inherited:
            return None
        self.end()
        self._abandoned = self._abandoned or "before its loop went on"
        return self._not_entered(self._abandoned)

    def swallows(self, raised: BaseException | None, end: BaseException | None) -> bool:
        """
        Return whether the block keeps what its body *raised*: nothing but the end of this term.

        *end* is what is on its way out when the lock was released.

        Raises:
            BaseException: *end*, if it is neither that nor what the body raised.
        """
        if end is None or _is_end_of(self.lease, end):
            return not isinstance(raised, GeneratorExit)  # a generator that is closed ends: its loop must not go on
        if end is not raised:
            raise end
        return False

    @property
    def _inherited(self) -> bool:
        return self._pid != os.getpid()

    def _not_entered(self, when: str) -> UsageError:
        return UsageError(
            f"a term of election {shown(self.election.name)} was not entered {when}, so its lock was released; "
            f"write '{self._statement} term as lease:' as the first line of the loop"
        )


def _is_end_of(lease: AnyLease, error: BaseException) -> bool:
    """Return whether *error* says nothing but that this very lease is over."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_end_of(lease, one) for one in error.exceptions)
    own = (lease.name, state_of(lease).number)
    return isinstance(error, LeaseLostError) and (error.name, error.token) == own


class ElectionTerm(Uncopied):
    """
    The lead of this process, for as long as its lease is held: ``async with term as lease``, at once and once.

    The body is cancelled when the lead is lost, when the election resigns, and when the client drains. These ends are
    not errors: the loop goes on. Everything else that the body raises leaves as it is.
    """

    __slots__ = ("_block",)

    def __init__(self, block: TermBlock) -> None:
        self._block = block

    def __repr__(self) -> str:
        return f"<ElectionTerm of {self.lease!r}>"

    @property
    def lease(self) -> Lease:
        """The lease of the term."""
        return self._block.lease

    @property
    def over(self) -> bool:
        """True if the body is to end: the lead was lost, the election resigned, or the client drains."""
        return self._block.over

    async def __aenter__(self) -> Lease:
        self._block.enter()
        return self.lease

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._block.leave(raised, traceback)


class TermBlock(TermLife[Lease]):
    """The block of a task: a scope inside that of its lock."""

    __slots__ = ("_forget", "_lock", "_loop", "_releasing", "_scope", "_timer")

    def __init__(self, election: ElectionState, lock: Lock, lease: Lease) -> None:
        super().__init__(election, lease, "async with")
        self._lock = lock
        self._scope: PlainScope | None = None
        self._forget: Callable[[], object] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(lease.ttl, self._give_up, "within one ttl", context=Context())
        self.begin()

    def enter(self) -> None:
        """
        Begin the block.

        Raises:
            UsageError: as `check_enterable`.
        """
        self.check_enterable()
        draining = self.election.engine().draining
        self._timer.cancel()
        enter_with(self._lock, self.lease)
        self.entered = True
        self._scope = paced_scope(state_of(self.lease).timing.safety_buffer / 2)
        self._scope.__enter__()
        self._forget = draining.on_begin(self._stop_in_time)
        if self.stopped:
            self._scope.cancel()

    async def leave(self, raised: BaseException | None, traceback: TracebackType | None) -> bool:
        """End the block and release the lock; return whether *raised* was nothing but the end of the term."""
        self._forget()
        self._timer.cancel()
        end = self._close_scope(raised)
        try:
            await self._lock.__aexit__(None if end is None else type(end), end, None if end is None else traceback)
        except LeaseLostError as error:
            end = error
        finally:
            self.end()
        return self.swallows(raised, end)

    def stop(self) -> None:
        """Cancel the body, which cleans up under its lease."""
        super().stop()
        if self._scope is not None:
            self._scope.cancel()

    async def check_entered(self) -> None:
        """
        Release a term that was not entered when the loop goes on.

        Raises:
            UsageError: it was not, and its body would have run without the lead.
        """
        if (error := self.refuse_unentered()) is not None:
            self._timer.cancel()
            await self.lease.release()
            raise error

    def left_behind(self) -> None:
        """Release a term that is not entered in this turn of the event loop: its loop was left. From any thread."""
        if not self.entered and self in self.election.here.terms:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._give_up, "before its loop was left", context=Context())

    def _give_up(self, when: str) -> None:
        if self.abandon(when):
            self._timer.cancel()
            self._releasing = self._loop.create_task(self.lease.release(), context=Context(), name="fencing-release")

    def _stop_in_time(self) -> None:
        """End the body ``finish_within`` seconds after the beginning of a drain."""
        if self.election.finish_within > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.election.finish_within, self.stop, context=Context())
        else:
            self.stop()

    def _close_scope(self, raised: BaseException | None) -> BaseException | None:
        """Close the inner scope and return what is still on its way out; a cancellation from outside is."""
        scope = self._scope
        assert scope is not None  # __aenter__ made it
        try:
            swallowed = scope.__exit__(None if raised is None else type(raised), raised, None)
        except RuntimeError:  # another scope is inside, or this is another task: the lock raises the error for it
            scope.give_up()
            return raised
        except BaseException as rest:  # noqa: BLE001  (the part of a group that was not ours; it leaves)
            return rest
        return None if swallowed else raised
