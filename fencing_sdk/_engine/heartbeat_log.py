"""What the log and the observers are told by a heartbeat: beats that come late, a silent store, and lost leases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from contextvars import Context

from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.stall_watch import StallWatch
from fencing_sdk._values.claim import Renewal, Revoked
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import LeaseLostError, LossReason

_LATE = 1 / 4
"""Part of an interval from which a beat counts as late; never less than `_LATE_FLOOR` seconds."""
_LATE_FLOOR = 0.05
SILENT = "the store did not answer"
"""What is said of a renewal without an answer where no error says more."""


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
        """Tell which leases are looked after late."""
        late = [
            (lease, lease.next_beat)
            for lease in due
            if now - lease.next_beat > _LATE_FLOOR  # the limit is no less, and to compute it costs more
            and now - lease.next_beat > _lateness_limit(lease)
            and lease.held_at(now)
        ]
        if late:
            earliest = min(when for _, when in late)
            by = _by(self._stack_since(earliest))
            cause = f"the event loop was blocked{by}" if by else "the process did not run, or its loop was blocked"
            logger.warning("heartbeat %.3g s late: %s", now - earliest, cause)
        for lease, when in late:
            self._report.late(lease, now - when, self._stack_since(when))

    def renewed(self, outcomes: Sequence[Renewal | Revoked], error: str) -> None:
        """Log the first renewal in a row that has no answer, and the first that has one again."""
        fails = Renewal.UNKNOWN in outcomes
        if fails and not self._renewals_fail:
            logger.warning("a renewal of %d leases is tried again until they end: %s", len(outcomes), error or SILENT)
        elif self._renewals_fail and not fails:
            logger.info("renewals are answered again")
        self._renewals_fail = fails

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Tell that *lease* was lost. One line is logged for all that are lost in this turn of the loop."""
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
    """Say what the loop was blocked by, where that was seen."""
    return f" by\n{stack}" if stack else ""


def _lateness_limit(lease: LeaseState) -> float:
    return max(_LATE_FLOOR, lease.timing.heartbeat_interval * _LATE)
