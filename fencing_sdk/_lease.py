"""
The tenure a task holds: a token and a deadline that moves.

What may live here: the state of one lease and the cancel scope that ends its work. A lease is
pushed by the heartbeat (`extend`, `lose`); it reads its clock and calls nobody but its keeper.

    held -> lost(reason)        once, for ever
    held -> released

Three parties can end it and none needs the others: the deadline (a timer that cancels the scope, and
the clock at every use of the token), the store's answer, and a notice pushed by the store. A late
answer never revives: the *old* deadline is compared with the clock before it is moved, because a
scope that is moved after its deadline passed, and before it was delivered, would revive silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import warnings
import weakref
from contextvars import Context
from typing import Protocol

import anyio

from fencing_sdk._claim import Claim, Token
from fencing_sdk._clock import Clock
from fencing_sdk._fork import generation
from fencing_sdk._timing import Timing
from fencing_sdk._wire import token_headers
from fencing_sdk.errors import LeaseLostError, LossReason, StaleTokenError, UsageError, shown

_STALLED_FROM = 0.05
"""Seconds of lateness below which a missed moment is put down to the inexactness of timers."""


@functools.cache
def scope_class() -> type[anyio.CancelScope]:
    """The class behind `anyio.CancelScope`, which finds out at every call that this is asyncio."""
    asyncio.get_running_loop()  # elsewhere this fails and is not kept: trio's class would be returned for ever
    return type(anyio.CancelScope())


class Keeper(Protocol):
    """Who renews and releases on behalf of a lease. Called in the event loop of the lease."""

    async def renew(self, lease: Lease) -> None: ...

    async def release(self, lease: Lease) -> None: ...

    def lost(self, lease: Lease, reason: LossReason) -> None: ...

    def stale(self, lease: Lease, error: StaleTokenError) -> None: ...

    def dropped(self, claim: Claim) -> None: ...


def _look_again(reference: weakref.ref[Lease]) -> None:
    """Let a timer that does not keep its lease alive look at the deadline."""
    if (lease := reference()) is not None:
        lease.watch_deadline()


class Lease:
    """
    A lock that is held, until its deadline.

    The deadline moves with every confirmed renewal. Past it every use of the token raises, even
    when the process slept for an hour and nothing else noticed. Safe to read from any thread;
    `renew`, `release` and `wait_lost` belong to the event loop that acquired it.

    Not promised: that a thread, a shielded block or C code under the lease stops. The token, and a
    guard at the resource, are for those.
    """

    __slots__ = (
        "__weakref__",
        "_acquired_at",
        "_announced",
        "_claim",
        "_clock",
        "_deadline",
        "_ended",
        "_generation",
        "_hold_until",
        "_keeper",
        "_loop",
        "_lost",
        "_next_beat",
        "_number",
        "_released",
        "_scope",
        "_timer",
        "_timing",
        "_token",
        "doubt",
        "host",
        "name",
        "stray",
    )

    def __init__(
        self, *, name: str, claim: Claim, token: int, deadline: float, timing: Timing, clock: Clock, keeper: Keeper
    ) -> None:
        now = clock.now()
        self.name = name
        self.stray: tuple[asyncio.Task[object], ...] = ()
        """Attempts of this acquisition without an answer, which may still reach the store."""
        self.host: asyncio.Task[object] | None = None
        """The task that is inside ``async with`` by this lease."""
        self.doubt = ""
        """What became of the last renewal, where it has no answer: for the error that says how the lease ended."""
        self._claim = claim
        self._number = token
        self._token: Token | None = None
        self._timing = timing
        self._clock = clock
        self._keeper = keeper
        self._acquired_at = now
        self._hold_until = math.inf if timing.max_hold is None else now + timing.max_hold
        self._deadline = min(deadline, self._hold_until)
        self._lost: LossReason | None = None
        self._released = False
        self._announced = False
        self._next_beat = math.inf
        self._scope: anyio.CancelScope | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Event | None = None  # made for whoever waits for it: few do
        self._generation = generation()

    def __repr__(self) -> str:
        if (reason := self.lost_reason) is not None:
            state = f"lost: {reason.value}"
        elif self._released:
            state = "released"
        else:
            state = f"{self.remaining:.1f} s left"
        return f"<Lease {shown(self.name)} token={self._number:d}, {state}>"

    def __del__(self) -> None:
        if not hasattr(self, "_generation") or self._released or self._generation != generation():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the ttl will free the lock
            self._loop.call_soon_threadsafe(self._keeper.dropped, self._claim)
        if self._lost is None:
            message = f"lease on {shown(self.name)} (token {self._number:d}) was dropped without release"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def token(self) -> Token:
        """
        The fencing token: an int to send with every write. Read it at the last moment.

        Raises:
            LeaseLostError: the lease is over. The clock is looked at now, at this very read.
        """
        self.check()
        token = self._token
        if token is None:
            token = self._token = Token(self._number, self._claim.holder)
        return token

    @property
    def owner(self) -> str:
        """The secret id of this acquisition. Whoever knows it may release the lock: never send or log it."""
        return self._claim.owner

    @property
    def holder(self) -> str:
        """A short public digest of the owner id, safe to send and log."""
        return self._claim.holder

    @property
    def ttl(self) -> float:
        """Seconds the store keeps the lock after the last renewal."""
        return self._timing.ttl

    @property
    def remaining(self) -> float:
        """Seconds until the deadline as it stands now; 0 when the lease is over."""
        return max(0.0, self._deadline - self._clock.now()) if self.held else 0.0

    @property
    def held(self) -> bool:
        """Whether the lease may be used at this moment."""
        return not self._released and self.lost_reason is None

    def held_at(self, now: float) -> bool:
        """`held`, by a clock reading that the caller has taken just now: for going through many leases."""
        return (self._lost is None and not self._released and now < self._deadline) or self.held

    @property
    def lost_reason(self) -> LossReason | None:
        """Why the lease ended against our will; None while it is held, or when it was released in time."""
        if self._lost is None and not self._released:
            if self._generation != generation():
                self._lost = LossReason.CLOSED  # inert: the loop and the connection belong to the parent
            elif self._clock.now() >= self._deadline:
                self._expire()
        return self._lost

    def check(self) -> None:
        """
        Do nothing while the lease is held. Sprinkle it through long work that does not await.

        Raises:
            LeaseLostError: the lease is over.
        """
        if (
            self._lost is None
            and not self._released
            and self._generation == generation()
            and self._clock.now() < self._deadline
        ):
            return
        raise self.loss()

    def headers(self) -> dict[str, str]:
        """
        The HTTP headers that carry the token to a guarded service.

        Raises:
            LeaseLostError: the lease is over.
        """
        return token_headers(self.token)

    async def wait_lost(self) -> LossReason | None:
        """Wait until the lease is over; return why it was lost, or None when it was released."""
        self._same_loop()
        if self._ended is None:
            self._ended = asyncio.Event()
        while self.held:
            await self._ended.wait()
        return self._lost

    async def renew(self) -> None:
        """
        Renew now, besides the heartbeat.

        Raises:
            LeaseLostError: the lease is over, or the store refused.
            BackendUnavailableError: the store did not answer; the lease goes on until its deadline.
        """
        self._same_loop()
        self.check()
        await self._keeper.renew(self)

    async def release(self) -> None:
        """Give the lock back. Idempotent, shielded from cancellation and bounded; never touches another's grant."""
        if self._generation != generation():
            return
        self._same_loop()
        await self._keeper.release(self)

    def _same_loop(self) -> None:
        if self._generation == generation() and asyncio.get_running_loop() is not self._loop:
            msg = (
                f"lease on {shown(self.name)} belongs to another event loop; "
                "from a thread use anyio.from_thread.run or asyncio.run_coroutine_threadsafe"
            )
            raise UsageError(msg)

    # The engine's side. Everything below runs in the event loop, except `_expire`.

    @property
    def claim(self) -> Claim:
        """What the store knows us by."""
        return self._claim

    @property
    def timing(self) -> Timing:
        """The numbers of this lease."""
        return self._timing

    @property
    def deadline(self) -> float:
        """The local moment, on the client's clock, at which the lease ends unless it is renewed."""
        return self._deadline

    @property
    def renewable(self) -> bool:
        """Whether a renewal could still move the deadline: ``max_hold`` may forbid it."""
        return self._deadline < self._hold_until

    @property
    def held_for(self) -> float:
        """Seconds since the lease was granted."""
        return self._clock.now() - self._acquired_at

    @property
    def last_token(self) -> int:
        """The number the lease has or had, for events and errors."""
        return int(self._number)

    def loss(self, reason: LossReason | None = None) -> LeaseLostError:
        """The error that says how the lease ended."""
        reason = reason or self.lost_reason or LossReason.CLOSED
        detail = ""
        if reason is LossReason.EXPIRED and not self.renewable:
            detail = f"max_hold={self._timing.max_hold:g} is over"
        elif reason is LossReason.EXPIRED:
            detail = "no renewal was confirmed in time" + (f", the last: {self.doubt}" if self.doubt else "")
        return LeaseLostError(self.name, self.last_token, reason, detail)

    def kept_by(self, keeper: Keeper) -> bool:
        """Whether *keeper* renews this lease."""
        return self._keeper is keeper

    def report_stale(self, error: StaleTokenError) -> None:
        """A guard refused a write made under this lease."""
        self._keeper.stale(self, error)

    @property
    def overdue_since(self) -> float:
        """When the heartbeat meant to look after this lease next: to renew it, or to see it end."""
        return min(self._next_beat, self._deadline)

    def expect_beat(self, when: float) -> bool:
        """
        Note when the heartbeat means to renew next (infinity: a renewal is on its way).

        False when that would be too late, or could not move the deadline; then no beat is expected.
        """
        hopeful = when < self._deadline < self._hold_until
        self._next_beat = when if hopeful else math.inf
        return hopeful

    def extend(self, deadline: float) -> bool:
        """Move the deadline after a confirmed renewal; False when the old one had passed already."""
        if not self.held:
            return False
        deadline = min(deadline, self._hold_until)
        self._deadline = max(self._deadline, deadline)
        self.doubt = ""
        return True

    def lose(self, reason: LossReason) -> None:
        """End the lease and cancel its work."""
        if self.lost_reason is None and not self._released:
            self._lost = reason
        if self._lost is not None:
            self._announce()

    def mark_released(self) -> bool:
        """End the lease on our own will; False when it was released before. A loss that happened stays one."""
        if self._released:
            return False
        if self.lost_reason is None:
            self._stop_watching()  # the body goes on without the lock, by its own decision
        self._released = True
        if self._ended is not None:
            self._ended.set()
        return True

    def _expire(self) -> None:
        """Latch the loss from whatever thread sees it first, and let the loop tell the others."""
        late = self._clock.now() - self.overdue_since
        stalled = late > max(_STALLED_FROM, self._timing.heartbeat_interval / 4)
        self._lost = LossReason.STALLED if stalled else LossReason.EXPIRED
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is left to cancel
            self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        if self._ended is not None:
            self._ended.set()
        if self._scope is not None:
            self._scope.cancel(f"lease on {shown(self.name)} lost")
        if self._lost is not None:
            self._keeper.lost(self, self._lost)

    def watch_deadline(self) -> None:
        """
        End the lease once its deadline has passed, by a timer that stays where it is when a renewal moves the deadline.

        When it fires too early it is set again, once in a lifetime of the deadline and not at every renewal.
        The loop has its clock and we have ours: what is converted is a span.
        """
        left = self._deadline - self._clock.now()
        if left > 0:
            self._timer = self._loop.call_later(left, _look_again, weakref.ref(self), context=Context())
        else:
            self.lose(LossReason.EXPIRED)

    def open_scope(self) -> anyio.CancelScope:
        """Enter a cancel scope in the current task that ends when the lease does."""
        scope = self._scope = scope_class()()
        scope.__enter__()
        self.watch_deadline()
        if self._lost is not None:
            scope.cancel()
        return scope

    def forget_scope(self) -> None:
        """Disarm the scope: whatever happens to the lease from now on cancels nobody."""
        if self._scope is not None:
            self._stop_watching()
            self._scope = None

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
