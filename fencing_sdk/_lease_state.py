"""
The state of one lease: a deadline that moves, and an end that comes once.

The engine, the heartbeat and the lease scope work on this object. Users hold a `Lease`, which shows a
part of it. The state calls only its keeper, the engine that acquired it.

    held -> lost(reason)        once, for ever
    held -> released

When is a lease lost? Each of these can end it, and none of them needs the others:

* the deadline, which `max_hold` may cut short: `LeaseGroup` keeps a timer for it, and every use of the token compares
  it with the clock. `_expire` distinguishes a process that stood still (`STALLED`) from a store that was silent
  (`EXPIRED`);
* the store's answer to a renewal: the heartbeat calls `lose`; or to the first release, which finds the loss too late;
* a bell by which the store says that an operator has ended the ticket: the heartbeat calls `lose`;
* the client: it is closed or its heartbeat fails (`CLOSED`), or the bound of a drain is over (`DRAINED`);
* the lock of another library beside it (`OldHold`) is lost (`TAKEN_OVER`), or is not renewed in time (`EXPIRED`);
* a fork of the process: in the child every lease is over (`CLOSED`).

A late answer never revives a lease. `extend` compares the *old* deadline with the clock before it moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from dataclasses import replace
from typing import Any, Protocol

import anyio

from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.answer import Call
from fencing_sdk._values.claim import Claim, Gone
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.loop_owner import running_loop
from fencing_sdk._values.timing import Timing
from fencing_sdk._values.token import Token, token_of_lease
from fencing_sdk.errors import LeaseLostError, LossReason, StaleTokenError, UsageError, shown

_STALLED_FROM = 0.05
"""A deadline that is noticed less than this many seconds late shows no stall, because timers are that inexact."""

_this_process: int


def _note_process() -> None:
    """Read the process id once for each process: at each read of a token it would take a third of that."""
    global _this_process  # noqa: PLW0603  (a property of the process)
    _this_process = os.getpid()


_note_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_process)


class Keeper(Protocol):
    """The engine, as a lease sees it. Called in the event loop of the lease."""

    async def renew(self, lease: LeaseState) -> None: ...
    async def release(self, lease: LeaseState) -> None: ...
    async def park(self, lease: LeaseState, seconds: float, within: float | None = None) -> None: ...
    async def detach(self, lease: LeaseState, keep: float, ticket: LeaseTicket | None = None) -> LeaseTicket: ...
    async def release_ticket(self, ticket: LeaseTicket) -> None: ...
    def lost(self, lease: LeaseState, reason: LossReason) -> None: ...
    def stale(self, lease: LeaseState, error: StaleTokenError) -> None: ...
    def abandon(self, lease: LeaseState) -> None: ...


class LeaseState:
    """A grant that is in use: the claim, the token's number, the deadline, and how the lease ended."""

    _token: Token | None = None
    _announced = False
    _scope: anyio.CancelScope | None = None
    _ended: asyncio.Event | None = None  # made for the first caller that waits: most leases have none
    older_transactions: tuple[object, ...] = ()
    """The transactions that were open in the caller's thread at the grant."""
    companion: Any = None
    """The lock of another library beside the lease, an `OldHold`, which is released before it."""
    covered_until = math.inf
    """The moment until which the companion is surely held: no renewal moves the deadline beyond it."""
    released = False
    task: asyncio.Task[object] | None = None
    """The task that is inside ``async with`` by this lease."""
    block: asyncio.Task[object] | None = None
    """The task that has begun a block of this plain handle. Another one may end it."""
    keep_for = 0.0
    """Seconds from the grant for which the lock stays taken, although the lease is released."""
    unanswered_calls: tuple[Call[Any], ...] = ()
    """Attempts of this acquisition without an answer, which may still reach the store."""
    loss_detail = ""
    """For the error that says how the lease ended: the last renewal without an answer, or an operator's reason."""
    lost: LossReason | None = None
    """Why the lease was lost; None while that is unnoticed. `lost_reason` looks at the deadline first."""
    next_beat = math.inf
    group: Any = None
    """The `LeaseGroup` that renews the lease and watches its deadline, while it is held."""
    ticket: Any = None
    """The `Ticket` that the lease came of, whose bell rings for it."""
    resumed_from: str | None = None
    """The public holder of the lease ticket that it goes on with."""
    handed_to: str | None = None
    """The public holder of the lease ticket that goes on with it."""

    def __init__(  # noqa: PLR0917  (eight positional ones: names would cost every acquisition time)
        self,
        name: str,
        claim: Claim,
        token: int,
        deadline: float,
        timing: Timing,
        clock: Clock,
        keeper: Keeper,
        permit: int | None = None,
    ) -> None:
        self.name = name
        self.claim = claim
        self.number = int(token)
        """The token as a plain number, readable after the end too: for events and errors."""
        self.permit = permit
        """The number of the permit, where the claim's mode is one."""
        self.timing = timing
        self.clock = clock
        self.keeper = keeper
        self.acquired_at = now = clock.now()
        self.hold_until = math.inf if timing.max_hold is None else now + timing.max_hold
        self.deadline = min(self.hold_until, deadline)
        """The local moment, on the client's clock, at which the lease ends unless it is renewed."""
        self.loop = asyncio.get_running_loop()
        _note_process()  # no hook runs when C code forks: a worker of uWSGI would take its own leases for its parent's
        self.pid = _this_process

    def __repr__(self) -> str:
        if (reason := self.lost_reason) is not None:
            state = f"lost: {reason.value}"
        elif self.released:
            state = "released"
        else:
            state = f"{self.remaining:.1f} s left"
        return f"<Lease {shown(self.name)} token={self.number:d}, {state}>"

    # What any thread may ask.

    @property
    def token(self) -> Token:
        """
        The fencing token.

        Raises:
            LeaseLostError: the lease is over. The clock is looked at now, at this very read.
        """
        self.check()
        token = self._token
        if token is None:
            token = token_of_lease(self.number, self.claim.token_holder(self.number), self.older_transactions)
            self._token = token
        return token

    def resource(self, name: str) -> str:
        """Return the resource of this lease of the lock *name* to a guard: each permit is one of its own."""
        return name if self.permit is None else f"{name}/{self.permit}"

    @property
    def owner(self) -> str:
        """The secret id of this acquisition."""
        return self.claim.owner

    @property
    def holder(self) -> str:
        """The public digest of the owner id."""
        return self.claim.holder

    @property
    def remaining(self) -> float:
        """Seconds until the deadline as it stands now; 0 when the lease is over."""
        return max(0.0, self.deadline - self.clock.now()) if self.held else 0.0

    @property
    def held(self) -> bool:
        """True if the lease may be used at this moment."""
        return not self.released and self.lost_reason is None

    def held_at(self, now: float) -> bool:
        """`held`, by a clock reading that the caller has taken just now: for going through many leases."""
        return (self.lost is None and not self.released and now < self.deadline) or self.held

    @property
    def held_for(self) -> float:
        """Seconds since the lease was granted."""
        return self.clock.now() - self.acquired_at

    @property
    def renewable(self) -> bool:
        """True if a renewal could still move the deadline: ``max_hold`` may forbid it."""
        return self.deadline < self.hold_until

    @property
    def held_to_the_end(self) -> bool:
        """True if ``max_hold`` has ended the lease of a plain handle, or of a thread's block."""
        return self.task is None and not self.renewable and self.lost in {LossReason.EXPIRED, LossReason.STALLED}

    @property
    def kept(self) -> bool:
        """True if the lock has to stay taken when the lease is released now."""
        return self.held and self.held_for < self.keep_for

    @property
    def lost_reason(self) -> LossReason | None:
        """
        Why the lease was lost; None while it is held, or when it was released in time.

        To read it looks at the clock, and ends a lease whose deadline has passed.
        """
        if self.lost is None and not self.released:
            if self.pid != _this_process:
                self.lost = LossReason.CLOSED  # inert: the loop and the connection belong to the parent process
            elif self.clock.now() >= self.deadline:
                self._expire()
        return self.lost

    def check(self) -> None:
        """
        Do nothing while the lease is held.

        Raises:
            LeaseLostError: the lease is over.
        """
        if self.lost is None and not self.released and self.pid == _this_process and self.clock.now() < self.deadline:
            return
        raise self.loss()

    def loss(self, reason: LossReason | None = None) -> LeaseLostError:
        """The error that says how the lease ended."""
        ended = LossReason.CLOSED if self.handed_to is None else LossReason.HANDED_OVER
        reason, detail = reason or self.lost_reason or ended, ""
        if reason is LossReason.EXPIRED and not self.renewable:
            detail = f"max_hold={self.timing.max_hold:g} is over"
        elif reason is LossReason.EXPIRED and self.deadline >= self.covered_until:
            detail = "the old lock beside it was not renewed in time"
        elif reason is LossReason.EXPIRED:
            error = self.loss_detail
            detail = "no renewal was confirmed in time" + (f", the last: {error}" if error else "")
        elif reason in {LossReason.REVOKED, LossReason.TAKEN_OVER}:
            detail = self.loss_detail
        elif reason is LossReason.CLOSED and self.released and self.lost is None:
            detail = "it was released"
        elif reason is LossReason.CLOSED and self.pid != _this_process:
            detail = "it belongs to the parent of this process, which is a fork"
        return LeaseLostError(self.name, self.number, reason, detail)

    def report_stale(self, error: StaleTokenError) -> None:
        """A guard refused a write made under this lease."""
        self.keeper.stale(self, error)

    # The caller's requests, in the event loop of the lease.

    def check_loop(self) -> None:
        """
        Refuse to work in another event loop than the lease's.

        Raises:
            UsageError: this is another loop.
        """
        if self.pid == _this_process and running_loop() is not self.loop:
            msg = (
                f"lease on {shown(self.name)} belongs to another event loop; "
                "from a thread use anyio.from_thread.run or asyncio.run_coroutine_threadsafe"
            )
            raise UsageError(msg)

    async def wait_lost(self) -> LossReason | None:
        """Wait until the lease is over; return why it was lost, or None when it was released."""
        self.check_loop()
        if self._ended is None:
            self._ended = asyncio.Event()
        while self.held:
            await self._ended.wait()
        return self.lost

    # The heartbeat's side.

    @property
    def due_at(self) -> float:
        """When the heartbeat means to look after this lease next: to renew it, or to see it end."""
        return min(self.next_beat, self.deadline)

    def expect_beat(self, when: float) -> None:
        """
        Note when the heartbeat means to renew next (infinity: a renewal is on its way).

        No beat is expected where that would be too late, or could not move the deadline.
        """
        self.next_beat = when if when < self.deadline < self.hold_until else math.inf

    def extend(self, deadline: float) -> bool:
        """Move the deadline after a confirmed renewal; False when the old one had passed already."""
        moves = self.lost is None and not self.released and self.clock.now() < self.deadline
        if not moves and not self.held:
            return False
        self.deadline = max(self.deadline, min(deadline, self.hold_until, self.covered_until))
        self.loss_detail = ""
        return True

    def bound_hold(self, max_hold: float) -> None:
        """Count *max_hold* of this lease, which is held, from now on."""
        self.timing = replace(self.timing, max_hold=max_hold)
        self.hold_until = self.clock.now() + max_hold
        self.deadline = min(self.deadline, self.hold_until)
        self.group.add(self)  # again: its timer may have to come earlier

    # The end.

    def lose(self, reason: LossReason, detail: str = "", *, by_release: bool = False) -> None:
        """
        End the lease and cancel its work. *detail*: what the operator wrote who took it away, or what took it over.

        *by_release*: the release has found that it was over before, so that it counts as lost and not as released.
        """
        if self.lost_reason is None and (by_release or not self.released):
            self.lost = reason
            if reason in {LossReason.REVOKED, LossReason.TAKEN_OVER}:
                self.loss_detail = detail
        if self.lost is not None:
            self._announce()

    def end(self) -> None:
        """The deadline has passed."""
        self.lose(LossReason.EXPIRED)

    def mark_released(self) -> bool:
        """End the lease as its holder wishes; False when it was released before. A loss that happened stays one."""
        if self.released:
            return False
        if self.lost_reason is None:
            self._scope = None  # the body goes on without the lock, by its own decision
        else:
            self._announce()  # a loss that only the clock has shown so far: report it before the release
        self.released = True
        if self._ended is not None:
            self._ended.set()
        return True

    def _expire(self) -> None:
        """Latch the loss from whatever thread sees it first, and let the loop notify the others."""
        late = self.clock.now() - self.due_at
        stalled = late > max(_STALLED_FROM, self.timing.heartbeat_interval / 4)
        self.lost = LossReason.STALLED if stalled else LossReason.EXPIRED
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is left to cancel
            self.loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        if not self.loop.is_closed():  # in a closed loop nothing waits and no body runs
            self._wake_holder()
        if self.lost is not None:
            self.keeper.lost(self, self.lost)

    def _wake_holder(self) -> None:
        if self._ended is not None:
            self._ended.set()
        if self._scope is not None:
            self._scope.cancel(f"lease on {shown(self.name)} lost")

    # The scope that cancels the body.

    def watch(self, scope: anyio.CancelScope) -> None:
        """Cancel *scope* when the lease is lost."""
        self._scope = scope
        if self.lost is not None:
            scope.cancel()

    def forget_scope(self) -> None:
        """Cancel nothing from now on, whatever happens to the lease."""
        self._scope = None


def loss_in(gone: Gone) -> tuple[LossReason, str]:
    """Map what became of a ticket to the reason of the loss and the operator's note."""
    if gone.reason is not None:
        return LossReason.REVOKED, gone.reason
    return LossReason.TAKEN_OVER if gone.taken else LossReason.REFUSED, ""


def raise_end(state: LeaseState, raised: BaseException | None) -> None:
    """
    Say what was wrong about a block whose lease was released, and whose body *raised*.

    Raises:
        LeaseLostError: the lease was lost, and the body raised nothing of its own.
    """
    if state.lost is not None:
        raise_loss(state, raised)


def raise_loss(state: LeaseState, raised: BaseException | None) -> None:
    """
    Say that the lease of a block was lost: by an error, or by a note on the error that the body *raised*.

    Raises:
        LeaseLostError: the lease is over, and the body raised nothing of its own.
    """
    loss = state.loss()
    if raised is None or isinstance(raised, GeneratorExit):
        raise loss from None
    says_so = isinstance(raised, LeaseLostError) and (raised.name, raised.token) == (state.name, state.number)
    if isinstance(raised, Exception) and not says_so:
        raised.add_note(
            f"fencing_sdk: the lease on {shown(state.name)} (token {state.number:d}) was lost too: {loss.reason.value}"
        )
