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
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import Context
from enum import StrEnum, unique
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from fencing_sdk._engine.engine import Engine
from fencing_sdk._lease import Lease
from fencing_sdk._lock import Lock, telling
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import BackendUnavailableError, DrainingError, LeaseLostError, shown
from fencing_sdk.recipes.election_term import ElectionState, ElectionTerm, TermBlock

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_PAUSE = 0.1
_LAST_PAUSE = 5.0
"""Seconds between two tries while the store does not answer; each pause is twice the one before."""
_AFTER_RESIGNING = 1.5
"""Seconds before a leader that has resigned stands again: longer than a waiter sleeps that the store cannot wake."""


@unique
class ElectionStanding(StrEnum):
    """How this process stands in an election. The value is the word for health endpoints and metrics."""

    IDLE = "idle"
    """No loop runs here."""

    CANDIDATE = "candidate"
    """Another process leads, or no process does yet; this one waits in line."""

    UNAVAILABLE = "unavailable"
    """The store has not answered for a ttl; this process goes on asking."""

    LEADING = "leading"
    """This process leads. The clock was looked at now."""

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
        """What is led, without the client's namespace."""
        return self._state.name

    @property
    def leading(self) -> bool:
        """True if this process leads at this moment, by the clock. May be read from any thread."""
        return self._state.leading

    @property
    def standing(self) -> ElectionStanding:
        """How this process stands, for health endpoints. May be read from any thread."""
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
        here = self.election.here
        here.candidacies.add(self)
        try:
            if resigned:
                await self._pause(_AFTER_RESIGNING)
            return await self._ride_out()
        finally:
            here.candidacies.discard(self)
            here.silent = False

    async def _ride_out(self) -> Lease | None:
        """Wait for the lead through outages of the store. See the story at the top for what leaves."""
        pause = _FIRST_PAUSE
        while not self.election.engine().draining.begun:
            try:
                return await self._lock.acquire()
            except DrainingError:
                break
            except (BackendUnavailableError, LeaseLostError) as error:
                self.election.here.silent = isinstance(error, BackendUnavailableError)
                logger.warning("election %s: %s; trying again", shown(self.election.name), error)
            await self._pause(pause * JITTER.uniform(0.5, 1.0))
            pause = min(2 * pause, _LAST_PAUSE)
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
