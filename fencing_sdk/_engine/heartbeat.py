"""
One heartbeat per client: renews every lease, and ends those that cannot be renewed.

A single task sleeps until something is due. Leases that begin or are renewed together stay together,
in a `RenewalBatch` that is scheduled as one, so that ten thousand leases cost a few entries and a few calls.
One call is sent in a turn of the loop, and one is settled, so that nobody else waits for them all.
Each claim has its own outcome, and a claim without an answer is tried again until its deadline, at a
pace that quickens towards it.
The call runs in a task of its own, so that one that hangs delays nobody: while it is away, the
deadlines of its leases are what this task waits for.

If this engine itself fails, every lease is lost at once: nobody would renew them any more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextvars import Context
from operator import attrgetter

from fencing_sdk._engine.lease_report import LeaseReport
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.renewal_batch import OpenBatch, RenewalBatch
from fencing_sdk._engine.schedule import Schedule
from fencing_sdk._engine.stalls import StallWatch
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, FencingError, LeaseLostError, LossReason

BATCH = 1000
"""Claims in one call: bounds a statement or script, and what one failing call delays."""
_WINDOW = 1 / 8
"""Part of an interval by which a beat may come early to join a batch."""
_LATE = 1 / 4
"""Part of an interval from which a beat counts as late; never less than `_LATE_FLOOR` seconds."""
_LATE_FLOOR = 0.05
_SILENT = "the store did not answer"
"""What is said of a renewal without an answer where no error says more."""
_INTERVALS = 64
"""Different intervals whose entries may wait for more leases although nobody is left in them."""


class Heartbeat:
    """Keeps the leases of one client alive, in one task."""

    def __init__(
        self, backend: Backend, clock: Clock, store_calls: StoreCalls, observers: Observers, *, watch_stalls: bool
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._suspends = store_calls.suspends
        self._report = LeaseReport(observers, clock)
        self._watch = StallWatch(clock) if watch_stalls else None
        self._leases: dict[str, LeaseState] = {}
        self._schedule: Schedule[RenewalBatch] = Schedule()
        self._newcomers: dict[str, OpenBatch] = {}  # by owner, until their first beat
        self._gathering: dict[float, OpenBatch] = {}  # by interval: those that the next one may join
        self._ends: dict[str, RenewalBatch] = {}  # by owner: those whose end is waited for, as no renewal can help them
        self._settling = asyncio.Lock()
        self._wake = asyncio.Event()
        self._asleep_until = float("inf")
        self._troubled = False
        self._losses = 0  # in this turn of the loop
        self._blocked_by = ""  # in this turn of the loop: the stack that cost some of them
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._leases)

    async def run(self) -> None:
        """Beat for ever. Ends only by cancellation or by its own failure, and then loses every lease."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._beat()
                await self._sleep(self._schedule.next())
        except BaseException as error:
            self.failure = error
            if not isinstance(error, asyncio.CancelledError) and not loop.is_closed():
                logger.critical("the heartbeat failed; every lease of this client is lost", exc_info=error)
            raise
        finally:
            if not loop.is_closed():  # else this is the garbage collector: the leases end by their deadlines
                self.lose_all(LossReason.CLOSED)
            self.stop_watching()

    def stop_watching(self) -> None:
        """End the thread that looks at the loop's stack."""
        if self._watch is not None:
            self._watch.stop()

    def add(self, lease: LeaseState, sent_at: float) -> None:
        """Keep *lease* alive; its last successful request left at *sent_at*."""
        owner, interval = lease.owner, lease.timing.heartbeat_interval
        if not self._leases:
            self._suspends.begin(self)
        self._leases[owner] = lease
        when = max(sent_at + interval, self._clock.now())  # after a slow grant: at once, and not late
        if not lease.expect_beat(when):
            self._await_end(lease)
            return
        newcomers = self._gathering.get(interval)
        if newcomers is None or len(newcomers.by_owner) >= BATCH or not newcomers.takes(when):
            newcomers = self._gathering[interval] = OpenBatch(interval, when)
            self._put(newcomers, when)
        newcomers.by_owner[owner] = lease
        self._newcomers[owner] = newcomers

    def forget(self, owner: str) -> None:
        """Renew no more. An answer that is still on its way will find nobody."""
        self._leases.pop(owner, None)
        if not self._leases:
            self._suspends.end(self)
        if (newcomers := self._newcomers.pop(owner, None)) is not None:
            del newcomers.by_owner[owner]
            if not newcomers.by_owner and len(self._gathering) > _INTERVALS:
                self._settle_in(newcomers)
                self._schedule.drop(newcomers)
        elif (end := self._ends.pop(owner, None)) is not None:
            self._schedule.drop(end)

    def find(self, claim: Claim) -> LeaseState | None:
        """The living lease of *claim*."""
        return self._leases.get(claim.owner)

    def lose_all(self, reason: LossReason) -> None:
        """End every lease."""
        for lease in tuple(self._leases.values()):
            lease.lose(reason)
        self._leases.clear()
        self._suspends.end(self)

    async def renew_now(self, lease: LeaseState) -> None:
        """
        Renew one lease outside its turn.

        Raises:
            LeaseLostError: the lease is over, also when it was released meanwhile.
            BackendError: the store did not answer.
        """
        sent_at = self._clock.now()
        limit = min(lease.timing.heartbeat_interval, lease.deadline - sent_at)
        try:
            answers = await self._store_calls.ask("renew", lambda: self._backend.renew((lease.claim,)), limit)
        except BackendUnavailableError:
            lease.check()
            raise
        lease.check()
        _check_count(answers, (lease.claim,), self._backend)
        self._apply(lease, answers[0], sent_at, "")
        lease.check()
        if answers[0] is Renewal.UNKNOWN:
            raise BackendUnavailableError(backend_name(self._backend), "renew")

    async def _beat(self) -> None:
        """Send what is due, one call in each turn of the loop."""
        for batch in self._batches(self._take_due(self._clock.now())):
            now = self._clock.now()
            if leases := [lease for lease in batch if lease.held_at(now)]:  # some waited here for a turn or more
                self._send(leases, now)
            self._expect(self._schedule.next())  # whoever runs in this turn may block it
            await asyncio.sleep(0)

    def _batches(self, due: Iterable[RenewalBatch]) -> Iterator[list[LeaseState]]:
        """
        Those to renew, `BATCH` at a time.

        Those that can wait for at most half an interval, so close is their deadline, are not mixed with
        the others: a call ends when the first of its leases must try again, and a slow store would
        answer nobody in time.
        """
        pressed: list[LeaseState] = []
        calm: list[LeaseState] = []
        for cohort in due:
            now = self._clock.now()
            living = cohort.living(now)
            if cohort.in_flight and living:
                self._put(cohort, min(lease.deadline for lease in living))
            elif not cohort.in_flight:
                for lease in living:
                    if lease.renewable or self._await_end(lease):
                        close = lease.deadline - now < lease.timing.heartbeat_interval
                        (pressed if close else calm).append(lease)
            for beating in (pressed, calm):
                while len(beating) >= BATCH:
                    yield beating[:BATCH]
                    del beating[:BATCH]
        yield from filter(None, (pressed, calm))

    def _await_end(self, lease: LeaseState) -> bool:
        """Look again when a lease that no renewal can help ends; False: it does not beat."""
        lease.expect_beat(float("inf"))  # the beat that found it beyond help was in time
        end = self._ends[lease.owner] = RenewalBatch((lease,))
        self._put(end, lease.deadline)
        return False

    def _take_due(self, now: float) -> list[RenewalBatch]:
        due = self._schedule.due(now)
        self._report_lateness(now, due)
        cohorts = [cohort for cohort, _ in due]
        first = next((lease for cohort in cohorts if not cohort.in_flight for lease in cohort.living(now)), None)
        if first is not None:
            window = first.timing.heartbeat_interval * _WINDOW
            cohorts += [cohort for cohort, _ in self._schedule.due(now + window)]
        for cohort in cohorts:
            if isinstance(cohort, OpenBatch):
                self._settle_in(cohort)
        return cohorts

    def _settle_in(self, newcomers: OpenBatch) -> None:
        """Take in nobody any more: from now on they are a cohort like any other."""
        if self._gathering.get(newcomers.interval) is newcomers:
            del self._gathering[newcomers.interval]
        for owner in newcomers.by_owner:
            del self._newcomers[owner]

    def _put(self, cohort: RenewalBatch, when: float) -> None:
        self._schedule.put(cohort, when)
        if when < self._asleep_until:
            self._asleep_until = when
            self._expect(when)  # now: the loop may be blocked before this task runs again
            self._wake.set()

    def _report_lateness(self, now: float, due: Sequence[tuple[RenewalBatch, float]]) -> None:
        late = [
            (lease, when)
            for cohort, when in due
            if now - when > _LATE_FLOOR and not cohort.in_flight
            for lease in cohort.living(now)
            if now - when > _lateness_limit(lease)
        ]
        if late:
            earliest = min(when for _, when in late)
            by = _by(self._blocking_stack(earliest))
            cause = f"the event loop was blocked{by}" if by else "the process did not run, or its loop was blocked"
            logger.warning("heartbeat %.3g s late: %s", now - earliest, cause)
        for lease, when in late:
            self._report.late(lease, now - when, self._blocking_stack(when))

    def _blocking_stack(self, since: float) -> str | None:
        return None if self._watch is None else self._watch.stack_since(since)

    def _send(self, leases: Sequence[LeaseState], now: float) -> None:
        """Renew *leases* by one call, and meanwhile wait for the first of their deadlines."""
        for lease in leases:
            lease.expect_beat(float("inf"))
        end = min([lease.deadline for lease in leases])
        quickest = min([lease.timing for lease in leases], key=attrgetter("heartbeat_interval"))
        flight = RenewalBatch(leases, in_flight=True)
        self._put(flight, end)
        limit = quickest.renewal_limit(end - now)
        self._store_calls.start(self._renew(flight, [lease.claim for lease in leases], now, limit))

    async def _renew(self, flight: RenewalBatch, claims: Sequence[Claim], sent_at: float, limit: float) -> None:
        error = ""
        outcomes: Sequence[Renewal]
        try:
            outcomes = await self._store_calls.ask("renew", lambda: self._backend.renew(claims), limit)
            _check_count(outcomes, claims, self._backend)
        except Exception as failure:  # noqa: BLE001  (whatever a driver raises, it is no proof of a loss)
            error = _told(failure)
            outcomes = [Renewal.UNKNOWN] * len(claims)
        self._tell_trouble(outcomes, error)
        async with self._settling:
            self._schedule.drop(flight)
            self._settle(flight, outcomes, sent_at, error)
            await asyncio.sleep(0)

    def _tell_trouble(self, outcomes: Sequence[Renewal], error: str) -> None:
        """Log the first renewal in a row that has no answer, and the first that has one again."""
        trouble = Renewal.UNKNOWN in outcomes
        if trouble and not self._troubled:
            logger.warning("a renewal of %d leases is tried again until they end: %s", len(outcomes), error or _SILENT)
        elif self._troubled and not trouble:
            logger.info("renewals are answered again")
        self._troubled = trouble

    def _settle(self, flight: RenewalBatch, outcomes: Sequence[Renewal], sent_at: float, error: str) -> None:
        """Apply the answers of one call, and put those that go on together again."""
        now = self._clock.now()
        renewed: dict[float, list[LeaseState]] = {}
        unanswered: dict[float, list[LeaseState]] = {}
        for lease, outcome in zip(flight.members, outcomes, strict=True):
            if not lease.held_at(now):
                continue
            self._apply(lease, outcome, sent_at, error)
            if outcome is Renewal.RENEWED:
                renewed.setdefault(lease.timing.heartbeat_interval, []).append(lease)
            elif outcome is Renewal.UNKNOWN:
                unanswered.setdefault(lease.timing.heartbeat_interval, []).append(lease)
        for interval, leases in renewed.items():
            self._plan(leases, sent_at + interval)
        for leases in unanswered.values():
            pause = min(lease.timing.retry_pause(lease.deadline - now) for lease in leases)
            self._plan(leases, now + pause * random.uniform(0.5, 1.0))

    def _apply(self, lease: LeaseState, outcome: Renewal, sent_at: float, error: str) -> None:
        """Tell one lease what became of it. An answer that came after the deadline changes nothing."""
        if outcome is Renewal.RENEWED:
            spare = lease.remaining if self._report else 0.0
            if lease.extend(lease.timing.deadline(sent_at)):
                self._report.renewed(lease, spare)
        elif outcome is Renewal.UNKNOWN:
            lease.last_renewal_error = error or _SILENT
            self._report.failed(lease, error)
        else:
            lease.lose(LossReason.TAKEN_OVER if outcome is Renewal.TAKEN_OVER else LossReason.REFUSED)

    def _plan(self, leases: Sequence[LeaseState], when: float) -> None:
        """Renew at *when*; where a renewal cannot help or would come too late, wait for the end."""
        when = max(when, self._clock.now())  # after a slow answer: at once, and not late
        beating = [lease for lease in leases if lease.expect_beat(when) or self._await_end(lease)]
        if beating:
            self._put(RenewalBatch(beating), when)

    def tell_lost(self, lease: LeaseState, reason: LossReason) -> None:
        """A lease ended against our will: forget it and tell the observers."""
        self.forget(lease.owner)
        if reason is not LossReason.CLOSED:
            self._log_loss(lease, reason)
        if reason is LossReason.STALLED:
            due = lease.overdue_since
            stack = self._blocking_stack(due)
            self._blocked_by = self._blocked_by or _by(stack)
            self._report.late(lease, self._clock.now() - due, stack)
        self._report.lost(lease, reason)

    def _log_loss(self, lease: LeaseState, reason: LossReason) -> None:
        """Log one line for all that are lost in this turn: thousands would hold up the cancellation of others."""
        if not self._losses:
            asyncio.get_running_loop().call_soon(self._log_losses, lease.loss(reason), context=Context())
        self._losses += 1

    def _log_losses(self, first: LeaseLostError) -> None:
        others, blocked_by = self._losses - 1, self._blocked_by
        self._losses, self._blocked_by = 0, ""
        more = f"; and so are {others} others" if others else ""
        logger.warning("%s%s%s", first, more, blocked_by and f"; the event loop was blocked{blocked_by}")

    async def _sleep(self, until: float | None) -> None:
        self._wake.clear()
        self._asleep_until = float("inf") if until is None else until
        self._expect(until)
        await self._suspends.sleep(self._wake, max(0.0, self._asleep_until - self._clock.now()))

    def _expect(self, until: float | None) -> None:
        """Have the loop's stack looked at if this task does not run soon after *until*."""
        if self._watch is not None:
            self._watch.arm(None if until is None else until + self._patience())

    def _patience(self) -> float:
        """Seconds of lateness after which the stack of the loop is looked at."""
        return min((_lateness_limit(lease) for lease in self._some_leases()), default=1.0)

    def _some_leases(self) -> Iterable[LeaseState]:
        return itertools.islice(self._leases.values(), 8)


def _told(failure: Exception) -> str:
    """Name *failure* in an event. The text of a driver's own error may hold a URL with its password."""
    return f"{type(failure).__name__}: {failure}" if isinstance(failure, FencingError) else type(failure).__name__


def _by(stack: str | None) -> str:
    """Say what the loop was blocked by, where that was seen."""
    return f" by\n{stack}" if stack else ""


def _check_count(outcomes: Sequence[Renewal], claims: Sequence[Claim], backend: Backend) -> None:
    if len(outcomes) != len(claims):
        raise BackendRefusedError(backend_name(backend), "renew", "not one outcome per claim")


def _lateness_limit(lease: LeaseState) -> float:
    return max(_LATE_FLOOR, lease.timing.heartbeat_interval * _LATE)
