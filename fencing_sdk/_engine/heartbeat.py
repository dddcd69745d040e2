"""
One heartbeat per client: renews every lease, and ends those that cannot be renewed.

A single task sleeps until a batch of leases is due. Then, for each batch:

1. `_send` renews the leases by one call to the store, in a task of its own, so that a call that hangs delays no
   other. Until it is answered, the heartbeat waits for the first deadline among these leases.
2. `_apply` tells each lease its own outcome: renewed, refused (lost at once), or unknown.
3. `_plan` puts the batch back: one interval after the call was sent if it was renewed, and after a pause that
   shrinks towards the deadline if the outcome is unknown. This is the only place that retries a renewal.
4. A lease that no renewal can help (`max_hold`, or a deadline that is too close) waits for its end.

Leases that begin or are renewed together stay together, so that ten thousand leases cost a few entries and a
few calls. One call is sent, and one is answered, in a turn of the loop, so that other tasks run in between.

If the heartbeat itself fails, every lease is lost at once, because none would be renewed any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from fencing_sdk._engine.heartbeat_log import SILENT, HeartbeatLog
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.renewal_batch import OpenBatch, RenewalBatch
from fencing_sdk._engine.reports import LeaseReport
from fencing_sdk._engine.schedule import Schedule
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, FencingError, LossReason

BATCH = 1000
"""Claims in one call: bounds a statement or script, and what one failing call delays."""
_WINDOW = 1 / 8
"""Part of an interval by which a renewal may come early to join a batch."""
_EMPTY_OPEN_BATCHES = 64
"""Open batches, each of another interval, that may wait for leases although they have none."""


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
        self._log = HeartbeatLog(clock, self._report, watch_stalls=watch_stalls)
        self._leases: dict[str, LeaseState] = {}
        self._schedule: Schedule[RenewalBatch] = Schedule()
        self._open_batches: dict[float, OpenBatch] = {}  # by interval: the one that the next lease may join
        self._batch_of: dict[str, OpenBatch] = {}  # by owner, until the first renewal
        self._ends: dict[str, RenewalBatch] = {}  # by owner: leases that wait for their end
        self._one_answer_at_a_time = asyncio.Lock()
        self._wake = asyncio.Event()
        self._asleep_until = float("inf")
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._leases)

    # The leases.

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
        batch = self._open_batches.get(interval)
        if batch is None or len(batch.by_owner) >= BATCH or not batch.takes(when):
            batch = self._open_batches[interval] = OpenBatch(interval, when)
            self._put(batch, when)
        batch.by_owner[owner] = lease
        self._batch_of[owner] = batch

    def forget(self, owner: str) -> None:
        """Renew this lease no more. An answer that is still on its way is ignored."""
        self._leases.pop(owner, None)
        if not self._leases:
            self._suspends.end(self)
        if (batch := self._batch_of.pop(owner, None)) is not None:
            del batch.by_owner[owner]
            if not batch.by_owner and len(self._open_batches) > _EMPTY_OPEN_BATCHES:
                self._close_batch(batch)
                self._schedule.drop(batch)
        elif (end := self._ends.pop(owner, None)) is not None:
            self._schedule.drop(end)

    def find(self, claim: Claim) -> LeaseState | None:
        """The living lease of *claim*."""
        return self._leases.get(claim.owner)

    def tell_lost(self, lease: LeaseState, reason: LossReason) -> None:
        """*lease* was lost: forget it, and tell the log and the observers."""
        self.forget(lease.owner)
        self._log.lost(lease, reason)

    def lose_all(self, reason: LossReason) -> None:
        """End every lease."""
        for lease in tuple(self._leases.values()):
            lease.lose(reason)
        self._leases.clear()
        self._suspends.end(self)

    # The task.

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
        self._log.stop()

    async def _beat(self) -> None:
        """Send what is due, one call in each turn of the loop."""
        for batch in self._calls(self._take_due(self._clock.now())):
            now = self._clock.now()
            if leases := [lease for lease in batch if lease.held_at(now)]:  # some waited here for a turn or more
                self._send(leases, now)
            self._log.expect_beat(self._schedule.next(), self._leases.values())  # a task of this turn may block it
            await asyncio.sleep(0)

    async def _sleep(self, until: float | None) -> None:
        self._wake.clear()
        self._asleep_until = float("inf") if until is None else until
        self._log.expect_beat(until, self._leases.values())
        await self._suspends.sleep(self._wake, max(0.0, self._asleep_until - self._clock.now()))

    def _put(self, batch: RenewalBatch, when: float) -> None:
        self._schedule.put(batch, when)
        if when < self._asleep_until:
            self._asleep_until = when
            self._log.expect_beat(when, self._leases.values())  # now: the loop may be blocked before this task runs
            self._wake.set()

    # What is due.

    def _take_due(self, now: float) -> list[RenewalBatch]:
        """Take the batches that are due at *now*, and those that may come early to be renewed with them."""
        due = self._schedule.due(now)
        self._log.beat(now, due)
        batches = [batch for batch, _ in due]
        first = next((lease for batch in batches if not batch.sent for lease in batch.living(now)), None)
        if first is not None:
            window = first.timing.heartbeat_interval * _WINDOW
            batches += [batch for batch, _ in self._schedule.due(now + window)]
        for batch in batches:
            if isinstance(batch, OpenBatch):
                self._close_batch(batch)
        return batches

    def _close_batch(self, batch: OpenBatch) -> None:
        """Let no more leases join: from now on it is a batch like any other."""
        if self._open_batches.get(batch.interval) is batch:
            del self._open_batches[batch.interval]
        for owner in batch.by_owner:
            del self._batch_of[owner]

    def _calls(self, due: Iterable[RenewalBatch]) -> Iterator[list[LeaseState]]:
        """
        The leases to renew, `BATCH` at a time.

        A lease whose deadline is closer than an interval is not mixed with the others. A call ends when
        the first of its leases must try again, so a slow store would answer none of the others in time.
        """
        close: list[LeaseState] = []
        calm: list[LeaseState] = []
        for batch in due:
            now = self._clock.now()
            living = batch.living(now)
            if batch.sent and living:
                self._put(batch, min(lease.deadline for lease in living))
            elif not batch.sent:
                for lease in living:
                    if lease.renewable or self._await_end(lease):
                        is_close = lease.deadline - now < lease.timing.heartbeat_interval
                        (close if is_close else calm).append(lease)
            for leases in (close, calm):
                while len(leases) >= BATCH:
                    yield leases[:BATCH]
                    del leases[:BATCH]
        yield from filter(None, (close, calm))

    def _await_end(self, lease: LeaseState) -> bool:
        """Look again when *lease*, which no renewal can help, ends. Return False: it is not renewed."""
        lease.expect_beat(float("inf"))  # the beat that found it beyond help was in time
        end = self._ends[lease.owner] = RenewalBatch((lease,))
        self._put(end, lease.deadline)
        return False

    # One call, and its answer.

    def _send(self, leases: Sequence[LeaseState], now: float) -> None:
        """Renew *leases* by one call, and meanwhile wait for the first of their deadlines."""
        for lease in leases:
            lease.expect_beat(float("inf"))
        end = min([lease.deadline for lease in leases])
        quickest = min([lease.timing for lease in leases], key=attrgetter("heartbeat_interval"))
        sent = RenewalBatch(leases, sent=True)
        self._put(sent, end)
        limit = quickest.renewal_limit(end - now)
        self._store_calls.start(self._renew(sent, [lease.claim for lease in leases], now, limit))

    async def _renew(self, sent: RenewalBatch, claims: Sequence[Claim], sent_at: float, limit: float) -> None:
        error = ""
        outcomes: Sequence[Renewal]
        try:
            outcomes = await self._store_calls.ask("renew", lambda: self._backend.renew(claims), limit)
            _check_count(outcomes, claims, self._backend)
        except Exception as failure:  # noqa: BLE001  (whatever a driver raises, it is no proof of a loss)
            error = _told(failure)
            outcomes = [Renewal.UNKNOWN] * len(claims)
        self._log.renewed(outcomes, error)
        async with self._one_answer_at_a_time:
            self._schedule.drop(sent)
            self._apply_all(sent, outcomes, sent_at, error)
            await asyncio.sleep(0)

    def _apply_all(self, sent: RenewalBatch, outcomes: Sequence[Renewal], sent_at: float, error: str) -> None:
        """Apply the answers of one call, and plan the next renewal of those that go on, together again."""
        now = self._clock.now()
        renewed: dict[float, list[LeaseState]] = {}
        unanswered: dict[float, list[LeaseState]] = {}
        for lease, outcome in zip(sent.members, outcomes, strict=True):
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
        """Tell one lease its outcome. An answer that came after the deadline changes nothing."""
        if outcome is Renewal.RENEWED:
            spare = lease.remaining if self._report else 0.0
            if lease.extend(lease.timing.deadline(sent_at)):
                self._report.renewed(lease, spare)
        elif outcome is Renewal.UNKNOWN:
            lease.last_renewal_error = error or SILENT
            self._report.failed(lease, error)
        else:
            lease.lose(LossReason.TAKEN_OVER if outcome is Renewal.TAKEN_OVER else LossReason.REFUSED)

    def _plan(self, leases: Sequence[LeaseState], when: float) -> None:
        """Renew at *when*; where a renewal cannot help or would come too late, wait for the end."""
        when = max(when, self._clock.now())  # after a slow answer: at once, and not late
        batch = [lease for lease in leases if lease.expect_beat(when) or self._await_end(lease)]
        if batch:
            self._put(RenewalBatch(batch), when)

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


def _told(failure: Exception) -> str:
    """Name *failure* in an event. The text of a driver's own error may hold a URL with its password."""
    return f"{type(failure).__name__}: {failure}" if isinstance(failure, FencingError) else type(failure).__name__


def _check_count(outcomes: Sequence[Renewal], claims: Sequence[Claim], backend: Backend) -> None:
    if len(outcomes) != len(claims):
        raise BackendRefusedError(backend_name(backend), "renew", "not one outcome per claim")
