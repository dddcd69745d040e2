"""
One heartbeat per client: keeps the tickets of every lease and of every waiter, and ends leases that cannot be kept.

A single task sleeps until a group of leases (`LeaseGroup`), or a ticket that waits, is due. Then:

1. `_send` keeps the tickets that are due by one call to the store, in a task of its own, so that a call that hangs
   delays no other.
2. `_apply` gives each lease its own outcome: it holds; it is gone (lost at once); or unknown. A ticket that waits takes
   its answer (`Ticket.take`), and its acquisition goes on.
3. `_plan` says when each is renewed next: one interval after the call was sent if it was renewed, and after a pause
   that shrinks towards the deadline if the outcome is unknown: a quarter of the time that is left, but no less than
   1/32 and no more than 1/4 of an interval, times a random 0.5 to 1 (`Timing.retry_pause`). Nothing else retries a
   renewal, except that a job which leaves its lock taken retries its last one (`releases`), and that within one call a
   backend may ask again, or ask another server. `Lease.renew` asks once. A backend that hears of a change renews too,
   to learn whether the lease is still its own; that moves no deadline.
4. A lease that no renewal can help (`max_hold`, or a deadline that is too close) waits for its end, which its group
   watches.

Leases that begin together are one group, and groups that are due together share a call, so that ten thousand leases
cost a few entries and a few calls. One call is sent, and one is answered, in a turn of the loop, so that other tasks
run in between.

If the heartbeat itself fails, every lease is lost at once, because no renewal would follow.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextvars import Context
from operator import attrgetter
from typing import Generic, TypeVar

from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._engine.ticket import Ticket
from fencing_sdk._engine.timers import StallWatch
from fencing_sdk._lease_state import LeaseState, loss_in
from fencing_sdk._values.claim import Gone, Place
from fencing_sdk._values.clock import JITTER, Clock
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk._values.reports import Status
from fencing_sdk.abc import Backend, Kept, News
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, FencingError, LeaseLostError, LossReason

BATCH = 1000
"""Claims in one call: bounds a statement or script, and what one failing call delays."""
_WINDOW = 1 / 8
"""Part of an interval by which a renewal may come early to join a batch."""
_EMPTY_OPEN_GROUPS = 64
"""Empty groups, one for each interval, that the heartbeat keeps open for new leases."""
_LATE = 1 / 4
"""Part of an interval from which a beat counts as late; never less than `_LATE_FLOOR` seconds."""
_LATE_FLOOR = 0.05
SILENT = "the store did not answer"

K = TypeVar("K", bound=Hashable)

_OPEN_FOR = 1 / 16
"""Part of an interval for which a new lease joins those that began before it."""
_SWEEP_ABOVE = 64


class LeaseGroup:
    """
    Leases of one interval that began almost together, and are neither released nor lost.

    They are renewed together, and one timer of the event loop watches over their deadlines: the heartbeat may hang or
    fail, and each of them ends in time all the same. A renewal that moves a deadline leaves the timer where it is. A
    timer that fires too early is set again: about once in each span of validity, and not at each renewal.
    """

    __slots__ = ("_clock", "_loop", "_timer", "_watched_until", "due", "interval", "members", "open_until", "since")

    def __init__(self, clock: Clock, interval: float, since: float) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched_until = math.inf  # when the timer fires, on the client's clock
        self.members: dict[str, LeaseState] = {}
        self.interval = interval
        self.since = since
        """When the first lease of the group is due. One that is due between this moment and `open_until` may join."""
        self.open_until = since + interval * _OPEN_FOR
        self.due = math.inf
        """When the heartbeat looks at them next."""

    def add(self, lease: LeaseState) -> None:
        """Renew *lease* with the others, and end it at its deadline."""
        self.members[lease.claim.owner] = lease
        lease.group = self
        if lease.deadline < self._watched_until:
            self._watch(lease.deadline)

    def remove(self, lease: LeaseState) -> None:
        """Drop *lease*, which was released or lost."""
        lease.group = None
        del self.members[lease.claim.owner]

    def stop(self) -> None:
        """Cancel the timer. Call only when the group is empty and closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watched_until = math.inf

    def next_look(self) -> float:
        """When the first of them is to be renewed, or ends if its renewal is on its way or would not help."""
        leases = self.members.values()
        return min([min(lease.next_beat, lease.deadline) for lease in leases], default=math.inf)

    def end_expired(self, now: float) -> None:
        """End what has passed its deadline. Each lease that is lost leaves the group."""
        for lease in [lease for lease in self.members.values() if lease.deadline <= now]:
            lease.end()

    def look(self) -> None:
        """End what has passed its deadline, and look again at the next one."""
        self.end_expired(self._clock.now())
        self.stop()
        if self.members:
            self._watch(min([lease.deadline for lease in self.members.values()]))

    def _watch(self, deadline: float) -> None:
        """Set the timer: to a delay, because the loop's clock is not the one by which leases are measured."""
        if self._timer is not None:
            self._timer.cancel()
        self._watched_until = deadline
        self._timer = self._loop.call_later(deadline - self._clock.now(), self.look, context=Context())


class Schedule(Generic[K]):
    """
    When something is due: a heap of moments, one for each key at most, without a clock, a task or a store.

    Keys are put at a moment and come out once it has passed. Putting a key again moves it; the entry left behind in the
    heap is skipped when it surfaces, and swept when such entries outnumber the living ones.
    """

    __slots__ = ("_heap", "_sequence", "_when")

    def __init__(self) -> None:
        self._when: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: K) -> bool:
        return key in self._when

    def put(self, key: K, when: float) -> None:
        """Make *key* due at *when*, whatever it was due at before."""
        self._sequence += 1
        self._when[key] = (when, self._sequence)
        heapq.heappush(self._heap, (when, self._sequence, key))
        self._sweep_if_crowded()

    def drop(self, key: K) -> None:
        """Forget *key*; it need not be known."""
        self._when.pop(key, None)
        self._sweep_if_crowded()

    def next(self) -> float | None:
        """The earliest moment, or None when nothing is scheduled."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[K, float]]:
        """Take out what is due at *now*, earliest first, each with its moment."""
        taken: list[tuple[K, float]] = []
        while self._heap and self._heap[0][0] <= now:
            when, sequence, key = heapq.heappop(self._heap)
            if self._when.get(key) == (when, sequence):
                del self._when[key]
                taken.append((key, when))
        return taken

    def _sweep_if_crowded(self) -> None:
        if len(self._heap) <= _SWEEP_ABOVE + 2 * len(self._when):
            return
        self._heap = [(when, sequence, key) for key, (when, sequence) in self._when.items()]
        heapq.heapify(self._heap)


class Heartbeat:
    """Keeps the leases of one client alive, in one task."""

    def __init__(
        self, backend: Backend, clock: Clock, store_calls: StoreCalls, observers: Observers, *, watch_stalls: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._suspends = store_calls.suspends
        self._report = LeaseReport(observers, clock)
        self.log = HeartbeatLog(clock, self._report, watch_stalls=watch_stalls)
        self.leases: dict[str, LeaseState] = {}
        """Every lease of the client by its owner, also one that was lost, until it is released or dropped."""
        self._suspends.leases = self.leases
        self._waiting: dict[Ticket, None] = {}
        self._schedule: Schedule[LeaseGroup | Ticket] = Schedule()
        self._open: dict[float, LeaseGroup] = {}  # by interval: the group that the next lease may join
        self._one_answer_at_a_time = asyncio.Lock()
        self.granted_at: float | None = None
        """When the latest lease was granted, on the client's clock."""
        self._wake = asyncio.Event()
        self._asleep_until = float("inf")
        self.failure: BaseException | None = None
        self.on_bell = self.rung  # bound once: every ticket has it

    def __len__(self) -> int:
        return sum(lease.lost is None for lease in self.leases.values())

    def status(self, leader_of: Sequence[str], *, usable: bool, draining: bool) -> Status:
        """Return what is held, and when the store last answered, without asking it."""
        answers = [at for at in (self.granted_at, self._store_calls.answered_at) if at is not None]
        spare = [lease.remaining for lease in tuple(self.leases.values()) if lease.held]
        return Status(
            open=usable,
            draining=draining,
            leases=len(spare),
            least_remaining=min(spare, default=None),
            since_answer=self._clock.now() - max(answers) if answers else None,
            leader_of=tuple(leader_of),
        )

    # The leases.

    def add(self, lease: LeaseState, renew_at: float) -> None:
        """Keep *lease* alive, from *renew_at* on."""
        interval = lease.timing.heartbeat_interval
        self.leases[lease.claim.owner] = lease
        self.granted_at = lease.acquired_at
        self._suspends.wake()
        when = max(renew_at, lease.acquired_at)  # after a slow grant: at once, and not late
        group = self._open.get(interval)
        if group is None or len(group.members) >= BATCH or not group.since <= when <= group.open_until:
            group = self._open[interval] = LeaseGroup(self._clock, interval, when)
        lease.expect_beat(max(group.since, lease.acquired_at))
        group.add(lease)
        if lease.next_beat < group.due or lease.deadline < group.due:
            self._put(group, lease.due_at)

    def forget(self, owner: str) -> LeaseState | None:
        """Renew this lease no more, and return it. An answer that is still on its way is ignored."""
        lease = self.leases.pop(owner, None)
        if lease is not None:
            self._leave_group(lease)
        return lease

    def _leave_group(self, lease: LeaseState) -> None:
        group = lease.group
        if group is not None:
            group.remove(lease)
            if group.members:
                return
            is_open = self._open.get(group.interval) is group
            if not is_open or len(self._open) > _EMPTY_OPEN_GROUPS:
                self._close_group(group)
                self._schedule.drop(group)

    def report_lost(self, lease: LeaseState, reason: LossReason) -> None:
        """*lease* was lost: stop renewing it, and report the loss to the log and the observers."""
        self._leave_group(lease)
        self.log.lost(lease, reason)

    def lose_all(self, reason: LossReason) -> None:
        """End every lease."""
        for lease in tuple(self.leases.values()):
            lease.lose(reason)
        for group in tuple(self._open.values()):
            self._close_group(group)

    # Tickets that wait, and bells.

    def wait(self, ticket: Ticket) -> None:
        """Keep *ticket*, which waits, from now on."""
        self._waiting[ticket] = None
        ticket.plan(self._clock.now())
        self._put_ticket(ticket)

    def wait_no_more(self, ticket: Ticket) -> None:
        """Leave *ticket* alone: its acquisition has ended, or draws again."""
        self._waiting.pop(ticket, None)
        self._schedule.drop(ticket)

    def forget_waiting(self) -> list[Ticket]:
        """Leave all tickets that wait alone, and return them."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting

    def keep_soon(self, ticket: Ticket) -> None:
        """Keep *ticket* at once, or again when the request about it that is under way is answered."""
        if ticket in self._schedule:
            ticket.due = self._clock.now()
            self._put_ticket(ticket)
        else:
            ticket.ask_again = True

    def rung(self, ticket: Ticket, news: News) -> None:
        """Take a bell of *ticket*: see `fencing_sdk.abc.Bell`. In a loop that is gone nothing hears it."""
        lease = ticket.lease
        if self._loop.is_closed():
            return
        if lease is None:
            if ticket.ring(news):
                self.keep_soon(ticket)
        elif isinstance(news, Gone) and news.reason is not None:
            lease.lose(*loss_in(news))
        elif not isinstance(news, Place) and lease.group is not None:
            ticket.ask_again = math.isinf(lease.next_beat)  # a keep is on its way, and may not know of it
            if not ticket.ask_again:
                lease.next_beat = self._clock.now()
                self._put_back(lease.group)

    def _put_ticket(self, ticket: Ticket) -> None:
        self._schedule.put(ticket, ticket.due)
        self._wake_before(ticket.due)

    # The task.

    async def run(self) -> None:
        """Beat for ever. Ends only by cancellation or by its own failure, and then loses every lease."""
        try:
            while True:
                leases, tickets = self._take_due(self._clock.now())
                for call, waiting in self._calls(leases, tickets):  # one in each turn of the loop
                    now = self._clock.now()
                    held = [lease for lease in call if lease.held_at(now)]  # some waited here for a turn or more
                    standing = [ticket for ticket in waiting if ticket in self._waiting]
                    if held or standing:
                        self._send(held, standing, now)
                    self.log.expect_beat(self._schedule.next(), self.leases.values())  # a task may block this turn
                    await asyncio.sleep(0)
                await self._sleep(self._schedule.next())
        except BaseException as error:
            self.failure = error
            if not isinstance(error, asyncio.CancelledError) and not self._loop.is_closed():
                logger.critical("the heartbeat failed; every lease of this client is lost", exc_info=error)
            raise
        finally:
            if not self._loop.is_closed():  # else this is the garbage collector: the leases end by their deadlines
                self.lose_all(LossReason.CLOSED)
            self.log.stop()

    async def _sleep(self, until: float | None) -> None:
        self._wake.clear()
        self._asleep_until = float("inf") if until is None else until
        self.log.expect_beat(until, self.leases.values())
        await self._suspends.sleep(self._wake, max(0.0, self._asleep_until - self._clock.now()))

    def _put(self, group: LeaseGroup, when: float) -> None:
        group.due = when
        self._schedule.put(group, when)
        self._wake_before(when)

    def _wake_before(self, when: float) -> None:
        if when < self._asleep_until:
            self._asleep_until = when
            self.log.expect_beat(when, self.leases.values())  # now: the loop may be blocked before this task runs
            self._wake.set()

    def _put_back(self, group: LeaseGroup) -> None:
        """Look at *group* again when the first of its leases is to be renewed, or ends."""
        if group.members:
            self._put(group, group.next_look())

    # What is due.

    def _take_due(self, now: float) -> tuple[list[LeaseState], list[Ticket]]:
        """Take what is due at *now*, and what may come early to be kept with it."""
        keys = [key for key, _ in self._schedule.due(now)]
        groups = [key for key in keys if isinstance(key, LeaseGroup)]
        for group in groups:
            group.end_expired(now)
        due = [lease for group in groups for lease in group.members.values() if lease.next_beat <= now]
        self.log.beat(now, due)
        if keys:
            every = due[0].timing.heartbeat_interval if due else keys[0].every if isinstance(keys[0], Ticket) else 0.0
            horizon = now + every * _WINDOW
            more = [key for key, _ in self._schedule.due(horizon)]
            groups += [key for key in more if isinstance(key, LeaseGroup)]
            keys += more
            due = [lease for group in groups for lease in group.members.values() if lease.next_beat <= horizon]
        for lease in due:
            lease.next_beat = math.inf
        for group in groups:
            self._close_group(group)
            self._put_back(group)
        return due, [key for key in keys if isinstance(key, Ticket)]

    def _close_group(self, group: LeaseGroup) -> None:
        """Let no more leases join."""
        if self._open.get(group.interval) is group:
            del self._open[group.interval]
        if not group.members:
            group.stop()

    def _calls(
        self, due: Iterable[LeaseState], tickets: Sequence[Ticket]
    ) -> Iterator[tuple[Sequence[LeaseState], Sequence[Ticket]]]:
        """
        The leases and tickets to keep, `BATCH` at a time.

        Leases that are closer to their deadline than an interval have calls of their own. A call ends when its most
        urgent lease must try again, so that the others would have no answer from a slow store.
        """
        close: list[LeaseState] = []
        calm: list[LeaseState] = []
        now = self._clock.now()
        for lease in due:
            if lease.deadline < lease.hold_until:  # else a renewal would not move it
                is_close = lease.deadline - now < lease.timing.heartbeat_interval
                (close if is_close else calm).append(lease)
        for leases in (close, calm):
            for start in range(0, len(leases), BATCH):
                call = leases[start : start + BATCH]
                room = BATCH - len(call) if leases is calm else 0
                yield call, tickets[:room]
                tickets = tickets[room:]
        for start in range(0, len(tickets), BATCH):
            yield (), tickets[start : start + BATCH]

    # One call, and its answer.

    def _send(self, leases: Sequence[LeaseState], tickets: Sequence[Ticket], now: float) -> None:
        """Keep the tickets of *leases*, and those that wait, by one call."""
        limit = min([ticket.every for ticket in tickets], default=math.inf)
        if leases:
            end = min([lease.deadline for lease in leases])
            quickest = min([lease.timing for lease in leases], key=attrgetter("heartbeat_interval"))
            limit = min(limit, quickest.renewal_limit(end - now))
        self._store_calls.start(self._keep(leases, tickets, now, limit), "fencing-renew")

    async def _keep(
        self, leases: Sequence[LeaseState], tickets: Sequence[Ticket], sent_at: float, limit: float
    ) -> None:
        kept: list[Kept] = [lease.ticket.kept for lease in leases]
        kept += [ticket.kept for ticket in tickets]
        error = ""
        outcomes: Sequence[Place | Gone | None]
        try:
            outcomes = await self._store_calls.ask("renew", self._backend.keep(kept), limit)
            _check_count(outcomes, kept, self._backend)
        except Exception as failure:  # noqa: BLE001  (whatever a driver raises, it proves no loss)
            error = type(failure).__name__  # the text of a driver's own error may hold a URL with its password
            error += f": {failure}" if isinstance(failure, FencingError) else ""
            outcomes = [None] * len(kept)
        self.log.renewed(outcomes, error)
        async with self._one_answer_at_a_time:
            now = self._clock.now()
            for ticket, outcome in zip(tickets, outcomes[len(leases) :], strict=True):
                if ticket in self._waiting:
                    if outcome is None:
                        ticket.take_silence(sent_at)
                    else:
                        ticket.take(outcome, sent_at)
                    ticket.plan(now)
                    self._put_ticket(ticket)
            self._apply_all(leases, outcomes[: len(leases)], sent_at, error)
            await asyncio.sleep(0)

    def _apply_all(
        self, leases: Sequence[LeaseState], outcomes: Sequence[Place | Gone | None], sent_at: float, error: str
    ) -> None:
        """Apply the answers of one call, and plan the next renewal of those that go on, together again."""
        now = self._clock.now()
        renewed: dict[float, list[LeaseState]] = {}
        unanswered: dict[float, list[LeaseState]] = {}
        rung: list[LeaseState] = []
        for lease, outcome in zip(leases, outcomes, strict=True):
            if not lease.held_at(now):
                continue
            self._apply(lease, outcome, sent_at, error)
            if lease.ticket.ask_again:
                lease.ticket.ask_again = False
                rung.append(lease)
            elif isinstance(outcome, Place) and lease.deadline < lease.covered_until:
                renewed.setdefault(lease.timing.heartbeat_interval, []).append(lease)
            elif not isinstance(outcome, Gone):  # a place moves no deadline beyond that of the companion
                unanswered.setdefault(lease.timing.heartbeat_interval, []).append(lease)
        self._plan(rung, now)
        for interval, members in renewed.items():
            self._plan(members, sent_at + interval)
        for members in unanswered.values():
            pause = min(lease.timing.retry_pause(lease.deadline - now) for lease in members)
            self._plan(members, now + pause * JITTER.uniform(0.5, 1.0))

    def _apply(self, lease: LeaseState, outcome: Place | Gone | None, sent_at: float, error: str) -> None:
        """Apply its outcome to one lease. An answer that came after the deadline changes nothing."""
        if isinstance(outcome, Place):
            observed = self._report.observed
            spare = lease.remaining if observed else 0.0
            if lease.extend(lease.timing.deadline(sent_at)) and observed:
                self._report.renewed(lease, spare)
        elif outcome is None:
            lease.loss_detail = error or SILENT
            self._report.failed(lease, error)
        else:
            lease.lose(*loss_in(outcome))

    def _plan(self, leases: Sequence[LeaseState], when: float) -> None:
        """Renew at *when*; where a renewal cannot help or would come too late, wait for the end."""
        when = max(when, self._clock.now())  # after a slow answer: at once, and not late
        for lease in leases:
            lease.expect_beat(when)
        for group in {id(lease.group): lease.group for lease in leases}.values():
            if group is not None:
                self._put_back(group)

    async def renew_now(self, lease: LeaseState) -> None:
        """
        Renew one lease outside its turn.

        Raises:
            LeaseLostError: the lease is over, also when it was released meanwhile.
            BackendError: the store did not answer.
        """
        sent_at, kept = self._clock.now(), [lease.ticket.kept]
        limit = min(lease.timing.heartbeat_interval, lease.deadline - sent_at)
        try:
            answers = await self._store_calls.ask("renew", self._backend.keep(kept), limit)
        except BackendUnavailableError:
            lease.check()
            raise
        lease.check()
        _check_count(answers, kept, self._backend)
        self._apply(lease, answers[0], sent_at, "")
        lease.check()
        if answers[0] is None:
            raise BackendUnavailableError(backend_name(self._backend), "renew")


def _check_count(outcomes: Sequence[Place | Gone | None], kept: Sequence[Kept], backend: Backend) -> None:
    if len(outcomes) != len(kept):
        raise BackendRefusedError(backend_name(backend), "renew", "not one outcome per ticket")


class HeartbeatLog:
    """Logs one line where thousands of leases have the same trouble, and names the code that blocked the loop."""

    def __init__(self, clock: Clock, report: LeaseReport, *, watch_stalls: bool) -> None:
        self._clock = clock
        self._report = report
        self._stalls = StallWatch(clock) if watch_stalls else None
        self._renewals_fail = False
        self._losses = 0  # in this turn of the loop
        self._blocked_by = ""  # the stack of what blocked the loop when some of them were lost

    def expect_beat(self, when: float | None, leases: Iterable[LeaseState]) -> None:
        """Look at the loop's stack if the heartbeat of *leases* does not run soon after *when*."""
        if self._stalls is not None:
            patience = min((_lateness_limit(lease) for lease in itertools.islice(leases, 8)), default=1.0)
            self._stalls.arm(None if when is None else when + patience)

    def stop(self) -> None:
        """End the thread that looks at the loop's stack."""
        if self._stalls is not None:
            self._stalls.stop()

    def beat(self, now: float, due: Iterable[LeaseState]) -> None:
        """Report the leases whose heartbeat is late."""
        late = [
            (lease, lease.next_beat)
            for lease in due
            if now - lease.next_beat > _LATE_FLOOR  # the limit is not less, and to compute it costs more
            and now - lease.next_beat > _lateness_limit(lease)
            and lease.held_at(now)
        ]
        if late:
            earliest = min(when for _, when in late)
            by = _by(self._stack_since(earliest))
            cause = (
                f"the event loop was blocked{by}" if by else "the event loop did not run, or nothing of this process"
            )
            logger.warning("heartbeat %.3g s late: %s", now - earliest, cause)
        for lease, when in late:
            self._report.late(lease, now - when, self._stack_since(when))

    def renewed(self, outcomes: Sequence[Place | Gone | None], error: str) -> None:
        """Log the first renewal in a row that has no answer, and the first that has one again."""
        fails = None in outcomes
        if fails and not self._renewals_fail:
            silent = outcomes.count(None)
            leases = "a lease" if silent == 1 else f"{silent} leases"
            logger.warning("the store did not renew %s; the client tries again: %s", leases, error or SILENT)
        elif self._renewals_fail and not fails:
            logger.info("renewals are answered again")
        self._renewals_fail = fails

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Report that *lease* was lost. Log one line for all that are lost in this turn of the loop."""
        if reason is not LossReason.CLOSED:
            if not self._losses:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._log_losses, lease.loss(reason), context=Context())
            self._losses += 1
        if reason is LossReason.STALLED:
            due = lease.due_at
            stack = self._stack_since(due)
            self._blocked_by = self._blocked_by or _by(stack)
            self._report.late(lease, self._clock.now() - due, stack)
        self._report.lost(lease, reason)

    def _log_losses(self, first: LeaseLostError) -> None:
        others, blocked_by = self._losses - 1, self._blocked_by
        self._losses, self._blocked_by = 0, ""
        more = f"; and so are {others} others" if others else ""
        logger.warning("%s%s%s", first, more, blocked_by and f"; the event loop was blocked{blocked_by}")

    def _stack_since(self, moment: float) -> str | None:
        return None if self._stalls is None else self._stalls.stack_since(moment)


def _by(stack: str | None) -> str:
    """Return what blocked the loop, if the watch saw it."""
    return f" by\n{stack}" if stack else ""


def _lateness_limit(lease: LeaseState) -> float:
    return max(_LATE_FLOOR, lease.timing.heartbeat_interval * _LATE)
