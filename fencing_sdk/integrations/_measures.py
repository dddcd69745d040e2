"""
The metrics, once for every library of them: an observer that moves instruments as events come.

    wait, hold, spare       histograms of seconds
    not acquired by reason, lost by reason, refused by a guard, renewals without an answer or late, jobs by outcome
                            counters
    accepted by a guard, requests without a token
                            counters, too
    held, waiting, the time of the last success of a job, the time when a fence last rose
                            gauges

Every instrument is kept by two labels: `lock`, the template of a name, and `recipe`, what the name was made for. A name
of each call would make series of each call.

Every counter of a lock exists, at 0, from the first use of the lock on, for each word that it may have: an alert reads
the difference of two numbers, and a series that begins with its first loss has one number only. The series of a job
begin when it is decorated, because an alert has to find the job that is never called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock, RLock

from fencing_sdk._values.claim import recipe_of, template_of
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.observers import Meter
from fencing_sdk.errors import ConfigurationError, LossReason, shown
from fencing_sdk.events import (
    Acquired,
    Acquiring,
    Event,
    FenceRaised,
    JobEnded,
    JobOutcome,
    Lost,
    NotAcquired,
    NotAcquiredReason,
    Released,
    RenewalFailed,
    RenewalLate,
    Renewed,
    StaleRejected,
    TokenMissing,
)

__all__ = ["LockLabel", "MetricsObserver", "Series", "lock_labels"]

LockLabel = Callable[[str], str]
"""From a name that no template made to the label ``lock``, of which there should be few. ``str`` keeps the name."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the histograms' buckets: from one round trip to a lock that is held for minutes."""

HELP = {
    "wait": "Seconds from the start of an acquisition to its lease. Its count is the number of leases.",
    "hold": "Seconds from the grant until the lease was released.",
    "spare": "Seconds that were left of the deadline when a renewal was confirmed.",
    "not_acquired": "Acquisitions that ended without a lease, by reason.",
    "lost": "Leases that ended before their holder released them, by reason.",
    "stale_rejected": "Refused writes, and fences that could not be raised.",
    "accepted": "Tokens that a guard accepted, in a write or to raise its fence.",
    "token_missing": "Requests without a token, refused or not.",
    "fence_raised_timestamp": "When this process last saw a higher token accepted, in seconds since 1970.",
    "renewals_failed": "Renewals without an answer. Each is tried again.",
    "renewals_late": "Renewals that came too late because the event loop was blocked.",
    "jobs": "Calls of jobs, by outcome.",
    "job_last_success_timestamp": "When this process last ran the job, in seconds since 1970. 0 if it has not yet.",
    "held": "Leases not released yet: a lost one counts until its holder lets go.",
    "waiting": "Acquisitions under way.",
}

COUNTED: dict[str, tuple[str, type[StrEnum]] | None] = {
    "not_acquired": ("reason", NotAcquiredReason),
    "lost": ("reason", LossReason),
    "stale_rejected": None,
    "accepted": None,
    "token_missing": None,
    "renewals_failed": None,
    "renewals_late": None,
    "jobs": ("outcome", JobOutcome),
}
"""The counters, and the label that some of them have besides `lock` and `recipe`, with its words."""


def lock_labels(lock_label: object) -> LockLabel:
    """
    Return what makes the label of every name: its template, or *lock_label* where it has none. None means ``other``.

    Raises:
        ConfigurationError: *lock_label* is not callable.
    """
    if lock_label is None:
        return lambda name: template_of(name) or "other"
    if not callable(lock_label):
        msg = f"lock_label must be a callable that makes a label of a lock name, such as str, not {shown(lock_label)}"
        raise ConfigurationError(msg)
    return lambda name: template_of(name) or lock_label(name)


@dataclass(slots=True)
class Series:
    """The instruments of one lock label and recipe, ready to be moved, and two gauges, which are numbers to be read."""

    wait: Callable[[float], object]
    hold: Callable[[float], object]
    spare: Callable[[float], object]
    count: Callable[[str, str, int], object]
    """Adds a number to the counter of this name in `COUNTED`, under one of its words, or "" where it has no words."""
    last_success: Callable[[float], object]
    """Sets when a job last succeeded, in seconds since 1970."""
    fence_raised: Callable[[float], object]
    """Sets when a fence last rose, in seconds since 1970."""
    highest: int = -1
    """The highest token that was accepted."""
    held: int = 0
    waiting: int = 0
    move_gauges: Callable[[int, int], object] | None = None
    """Takes the changes of ``waiting`` and ``held``, where the library cannot read them."""
    lock: Lock = field(default_factory=Lock)
    """Is held while a gauge or the highest token changes: clients of several threads may share an observer."""

    def see(self, token: int) -> None:
        """Note the time if *token* is higher than all before it."""
        with self.lock:
            if token > self.highest:
                self.highest = token
                self.fence_raised(wall_seconds())


class MetricsObserver(Meter):
    """An observer that moves the `Series` of each lock and recipe; *make* makes those that were not seen before."""

    def __init__(self, make: Callable[[str, str], Series], lock_label: LockLabel | None) -> None:
        self._make = make
        self._label = lock_labels(lock_label)
        self.made: dict[tuple[str, str], Series] = {}
        """The series that were made, by label and recipe."""
        self._making = RLock()  # a finalizer may come in between, in this very thread, and report, too
        self._last: tuple[str, Series] | None = None
        """The last name and its series: a lease has three events in a row, with one object as its name."""

    def job_made(self, name: str) -> None:
        """Let the series of a job begin, because it may be called from now on."""
        self._series(name)

    def acquiring(self, name: str) -> None:
        """An acquisition goes on."""
        series = self._series(name)
        with series.lock:
            series.waiting += 1
        if series.move_gauges is not None:
            series.move_gauges(1, 0)

    def acquired(self, name: str, waited: float) -> None:
        """Note that an acquisition got its lease."""
        series = self._series(name)
        with series.lock:
            series.waiting -= 1
            series.held += 1
        if series.move_gauges is not None:
            series.move_gauges(-1, 1)
        series.wait(waited)

    def renewed(self, name: str, spare: float) -> None:
        """The lease goes on."""
        self._series(name).spare(spare)

    def released(self, name: str, held_for: float) -> None:
        """The lease ended."""
        series = self._series(name)
        with series.lock:
            series.held -= 1
        if series.move_gauges is not None:
            series.move_gauges(0, -1)
        series.hold(held_for)

    def accepted(self, name: str, token: int) -> None:
        """Count a token that a guard accepted."""
        series = self._series(name)
        series.count("accepted", "", 1)
        series.see(token)

    def __call__(self, event: Event) -> None:
        """Count *event*; this is what makes it an observer."""
        match event:
            case Acquiring():
                self.acquiring(event.name)
            case Acquired():
                self.acquired(event.name, event.waited)
            case Renewed():
                self.renewed(event.name, event.spare)
            case Released():
                self.released(event.name, event.held_for)
            case _:
                _count(self._series(event.name), event)

    def _series(self, name: str) -> Series:
        last = self._last
        if last is not None and name is last[0]:
            return last[1]
        labels = self._label(name), recipe_of(name)
        series = self.made.get(labels) or self._new(labels)
        self._last = name, series
        return series

    def _new(self, labels: tuple[str, str]) -> Series:
        """Make the series of *labels*, unless another thread has just done so: with two, the gauges would be wrong."""
        with self._making:
            series = self.made.get(labels)
            if series is None:
                series = self._make(*labels)
                recipe = labels[1]
                for what, detail in COUNTED.items():
                    if what != "jobs" or recipe == "job":
                        for word in detail[1] if detail else ("",):
                            series.count(what, word, 0)
                if recipe == "job":
                    series.last_success(0)
                self.made[labels] = series
            return series


def _count(series: Series, event: Event) -> None:
    """Move the instruments of what is rare."""
    match event:
        case NotAcquired():
            with series.lock:
                series.waiting -= 1
            if series.move_gauges is not None:
                series.move_gauges(-1, 0)
            series.count("not_acquired", event.reason, 1)
        case Lost():
            series.count("lost", event.reason, 1)
        case StaleRejected() | TokenMissing():
            series.count(event.kind, "", 1)
        case FenceRaised():
            series.see(event.token)
        case RenewalFailed():
            series.count("renewals_failed", "", 1)
        case RenewalLate():
            series.count("renewals_late", "", 1)
        case JobEnded():
            series.count("jobs", event.outcome, 1)
            if event.outcome == JobOutcome.RAN:
                series.last_success(wall_seconds())
