"""
What is measured, once for every library of metrics: an observer that moves instruments as events come.

    wait, hold, spare       histograms of seconds
    not acquired by reason, lost by reason, refused by a guard, renewals without an answer or late, jobs
                            counters
    held, waiting           gauges

Every instrument is kept by two labels: `lock`, the template of a name, and `recipe`, what the name was made for. A name
of each call would make series of each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock, RLock

from fencing_sdk._values.names import recipe_of, template_of
from fencing_sdk._values.observers import Meter
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import (
    Acquired,
    Acquiring,
    Event,
    JobEnded,
    Lost,
    NotAcquired,
    Released,
    RenewalFailed,
    RenewalLate,
    Renewed,
    StaleRejected,
)

__all__ = ["Label", "MetricsObserver", "Series", "labels_of"]

Label = Callable[[str], str]
"""From a name that no template made to the label ``lock``, of which there should be few. ``str`` keeps the name."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the histograms' buckets: from one round trip to a lock that is held for minutes."""

HELP = {
    "wait": "Seconds from the begin of an acquisition to its lease. Its count is the number of leases.",
    "hold": "Seconds from the grant until the lease was given back.",
    "spare": "Seconds that were left of the deadline when a renewal was confirmed.",
    "not_acquired": "Acquisitions that ended without a lease, by reason.",
    "lost": "Leases that ended before their holder released them, by reason.",
    "stale_rejected": "Refused writes, and fences that could not be raised.",
    "renewals_failed": "Renewals without an answer. Each is tried again.",
    "renewals_late": "Renewals that came too late because the event loop was blocked.",
    "jobs": "Calls of jobs, by outcome.",
    "held": "Leases not given back yet: a lost one counts until its holder lets go.",
    "waiting": "Acquisitions that go on now.",
}


def labels_of(label: object) -> Label:
    """
    Return what makes the label of every name: its template, or *label* where it has none. None means ``other``.

    Raises:
        ConfigurationError: *label* is not callable.
    """
    if label is None:
        return lambda name: template_of(name) or "other"
    if not callable(label):
        msg = f"label must be a callable that makes a label of a lock name, such as label=str, not {shown(label)}"
        raise ConfigurationError(msg)
    return lambda name: template_of(name) or label(name)


@dataclass(slots=True)
class Series:
    """The instruments of one lock label and recipe, ready to be moved, and two gauges, which are numbers to be read."""

    wait: Callable[[float], object]
    hold: Callable[[float], object]
    spare: Callable[[float], object]
    not_acquired: Callable[[str], object]
    lost: Callable[[str], object]
    stale_rejected: Callable[[], object]
    renewals_failed: Callable[[], object]
    renewals_late: Callable[[], object]
    jobs: Callable[[str], object]
    held: int = 0
    waiting: int = 0
    tell: Callable[[int, int], object] | None = None
    """Is told by how much ``waiting`` and ``held`` have changed, where the library cannot read them."""
    lock: Lock = field(default_factory=Lock)
    """Is held while a gauge changes: clients of several threads may share an observer."""


class MetricsObserver(Meter):
    """An observer that moves the `Series` of each lock and recipe; *make* makes those that were not seen before."""

    def __init__(self, make: Callable[[str, str], Series], label: Label | None) -> None:
        self._make = make
        self._label = labels_of(label)
        self.made: dict[tuple[str, str], Series] = {}
        """By the label and the recipe."""
        self._making = RLock()  # a finalizer may come in between, in this very thread, and report, too
        self._last: tuple[str, Series] | None = None
        """A lease is told of three times in a row, with one object as its name."""

    def acquiring(self, name: str) -> None:
        """An acquisition goes on."""
        series = self._series(name)
        with series.lock:
            series.waiting += 1
        if series.tell is not None:
            series.tell(1, 0)

    def acquired(self, name: str, waited: float) -> None:
        """It came to a lease."""
        series = self._series(name)
        with series.lock:
            series.waiting -= 1
            series.held += 1
        if series.tell is not None:
            series.tell(-1, 1)
        series.wait(waited)

    def renewed(self, name: str, spare: float) -> None:
        """The lease goes on."""
        self._series(name).spare(spare)

    def released(self, name: str, held_for: float) -> None:
        """The lease ended."""
        series = self._series(name)
        with series.lock:
            series.held -= 1
        if series.tell is not None:
            series.tell(0, -1)
        series.hold(held_for)

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
                series = self.made[labels] = self._make(*labels)
            return series


def _count(series: Series, event: Event) -> None:
    """Move the instruments of what is rare."""
    match event:
        case NotAcquired():
            with series.lock:
                series.waiting -= 1
            if series.tell is not None:
                series.tell(-1, 0)
            series.not_acquired(event.reason)
        case Lost():
            series.lost(event.reason)
        case StaleRejected():
            series.stale_rejected()
        case RenewalFailed():
            series.renewals_failed()
        case RenewalLate():
            series.renewals_late()
        case JobEnded():
            series.jobs(event.outcome)
