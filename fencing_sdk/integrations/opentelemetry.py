"""
Spans and metrics for OpenTelemetry, by its API: the application chooses the SDK and where they are sent.

    locks = connect(url, observers=[OpenTelemetrySpans(), OpenTelemetryMetrics()])

An acquisition is a span, and so is the time for which the lease is held. Both are children of the span that was current
when the acquisition began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock

from fencing_sdk._values.drivers import imported_from

with imported_from("opentelemetry", "opentelemetry"):
    from opentelemetry.context import Context, get_current
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation, get_meter
    from opentelemetry.trace import Span, Status, StatusCode, TracerProvider, get_tracer

from fencing_sdk._values.claim import recipe_of
from fencing_sdk.events import (
    Acquired,
    Acquiring,
    Event,
    FenceRaised,
    Lost,
    NotAcquired,
    NotAcquiredReason,
    Released,
    RenewalFailed,
    RenewalLate,
    StaleRejected,
)
from fencing_sdk.integrations._measures import COUNTED, HELP, SECONDS, LockLabel, MetricsObserver, Series, lock_labels

__all__ = ["OpenTelemetryMetrics", "OpenTelemetrySpans"]

_SCOPE = "fencing_sdk"
_NO_ERROR = {
    NotAcquiredReason.HELD,
    NotAcquiredReason.TOO_LATE,
    NotAcquiredReason.DRAINING,
    NotAcquiredReason.CANCELLED,
}
"""Ends of an acquisition without a lease that the span does not show as errors."""


class OpenTelemetrySpans:
    """
    An observer that makes two spans of each acquisition, ``acquire <label>`` and ``hold <label>``.

    Both have the attributes ``fencing.lock.name``, ``fencing.recipe`` and ``fencing.holder``; ``hold`` has
    ``fencing.token`` and ``fencing.mode`` too. A loss is the event ``fencing.lost`` of the span ``hold``, which is an
    error then. Stale tokens and troubles of renewals are events also. A renewal that is confirmed is none: there may be
    many.

    Args:
        tracer_provider: Where the spans are made; the global one by default.

        lock_label: From a name that no template made to what the span's name says of it: ``other`` by default. The span
            of a decorated name says the template.

    Raises:
        ConfigurationError: *lock_label* is not callable.
    """

    def __init__(self, *, tracer_provider: TracerProvider | None = None, lock_label: LockLabel | None = None) -> None:
        self._tracer = get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._label = lock_labels(lock_label)
        self._spans: dict[str, tuple[Span, Context]] = {}

    def __call__(self, event: Event) -> None:
        """Begin, mark or end a span; this is what makes it an observer."""
        match event:
            case Acquiring(holder=holder):
                self._begin("acquire", event, holder, get_current(), {})
            case Acquired(holder=holder) if found := self._spans.pop(holder, None):
                acquiring, caller = found
                acquiring.set_attribute("fencing.token", event.token)
                acquiring.end()
                self._begin("hold", event, holder, caller, {"fencing.token": event.token, "fencing.mode": event.mode})
            case NotAcquired(holder=holder) if found := self._spans.pop(holder, None):
                found[0].set_attribute("fencing.not_acquired.reason", str(event.reason))
                if event.reason not in _NO_ERROR:
                    found[0].set_status(Status(StatusCode.ERROR, event.reason))
                found[0].end()
            case Released(holder=holder) if found := self._spans.pop(holder, None):
                found[0].set_attribute("fencing.release.confirmed", event.confirmed)
                found[0].end()
            case Lost() | StaleRejected() | FenceRaised() | RenewalFailed() | RenewalLate():
                self._mark(event)

    def _begin(self, what: str, event: Event, holder: str, caller: Context, more: _Attributes) -> None:
        name = f"{what} {self._label(event.name)}"
        lock, recipe = str(event.name), recipe_of(event.name)
        attributes = {"fencing.lock.name": lock, "fencing.recipe": recipe, "fencing.holder": holder, **more}
        self._spans[holder] = self._tracer.start_span(name, caller, attributes=attributes), caller

    def _mark(self, event: Event) -> None:
        """Add *event* to the span of its acquisition. A token of another client has none here."""
        found = None if event.holder is None else self._spans.get(event.holder)
        if found is None:
            return
        attributes = {f"fencing.{name}": value for name, value in event.as_dict().items() if name not in _IN_THE_SPAN}
        plain = {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}
        found[0].add_event(f"fencing.{event.kind}", plain)
        if isinstance(event, Lost):
            found[0].set_status(Status(StatusCode.ERROR, f"lease lost: {event.reason}"))


_Attributes = dict[str, str | int | float | bool]
_IN_THE_SPAN = frozenset({"kind", "name", "at", "holder"})
"""Fields of an event that its span has already."""


class OpenTelemetryMetrics(MetricsObserver):
    """
    An observer that keeps metrics, named ``fencing.*``, in seconds.

    Every point has the attributes ``lock`` and ``recipe``: ``lock``, ``semaphore``, ``reader``, ``writer``,
    ``multilock``, ``election``, ``job`` or ``row``.

    Counters and gauges are counted here and read when they are exported, because an instrument of the SDK costs more
    than an acquisition. The three histograms are recorded as they come.

    Args:
        meter_provider: Where the metrics are kept; the global one by default.

        lock_label: From a name that no template made to its attribute ``lock``, which is ``other`` by default. ``str``
            keeps every such name: each is then a series of its own. The label of a decorated name is its template,
            such as ``report/{report_id}``.

    Raises:
        ConfigurationError: *lock_label* is not callable.
    """

    def __init__(self, *, meter_provider: MeterProvider | None = None, lock_label: LockLabel | None = None) -> None:
        super().__init__(self._of, lock_label)
        self._meter = get_meter(_SCOPE, meter_provider=meter_provider)
        self._wait, self._hold = self._histogram("wait"), self._histogram("hold")
        self._spare = self._histogram("spare")
        counter, gauge = self._meter.create_observable_counter, self._meter.create_observable_up_down_counter
        self._tallies = {what: _Tally(counter, what, *(detail or ())[:1]) for what, detail in COUNTED.items()}
        self._last_success, self._fence_raised = self._moments("job_last_success"), self._moments("fence_raised")
        for what in ("held", "waiting"):
            gauge(f"fencing.{what}", [partial(self._read, what)], "1", HELP[what])

    def _histogram(self, what: str) -> Histogram:
        return self._meter.create_histogram(
            f"fencing.{what}", "s", HELP[what], explicit_bucket_boundaries_advisory=SECONDS
        )

    def _of(self, lock: str, recipe: str) -> Series:
        attributes, labels = {"lock": lock, "recipe": recipe}, (lock, recipe)
        return Series(
            wait=partial(self._wait.record, attributes=attributes),
            hold=partial(self._hold.record, attributes=attributes),
            spare=partial(self._spare.record, attributes=attributes),
            count=lambda what, word, more: self._tallies[what].add(labels, word, more),
            last_success=lambda at: self._last_success.update({labels: at}),
            fence_raised=lambda at: self._fence_raised.update({labels: at}),
        )

    def _read(self, what: str, _options: CallbackOptions) -> Iterable[Observation]:
        for (lock, recipe), series in self.made.copy().items():
            yield Observation(getattr(series, what), {"lock": lock, "recipe": recipe})

    def _moments(self, what: str) -> dict[tuple[str, str], float]:
        """Make a gauge of points in time; return the dict that it reads."""
        moments: dict[tuple[str, str], float] = {}

        def read(_options: CallbackOptions) -> Iterable[Observation]:
            for (lock, recipe), at in moments.copy().items():
                yield Observation(at, {"lock": lock, "recipe": recipe})

        name = f"{what}_timestamp"
        self._meter.create_observable_gauge(f"fencing.{name}", [read], "s", HELP[name])
        return moments


class _Tally:
    """One counter: a number for each lock, recipe and detail, read when the SDK collects."""

    def __init__(self, create: Callable[..., object], what: str, word: str = "") -> None:
        self._word = word
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lock = RLock()  # of several threads; a finalizer may come in between, in this very thread
        create(f"fencing.{what}", [self._read], "1", HELP[what])

    def add(self, labels: tuple[str, str], detail: str, more: int) -> None:
        key = *labels, detail
        with self._lock:
            self._numbers[key] = self._numbers.get(key, 0) + more

    def _read(self, _options: CallbackOptions) -> Iterable[Observation]:
        for (lock, recipe, detail), number in self._numbers.copy().items():
            labels = {"lock": lock, "recipe": recipe}
            yield Observation(number, labels | ({self._word: detail} if self._word else {}))
