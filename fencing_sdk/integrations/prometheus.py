"""
Metrics for Prometheus, by prometheus_client: in one process, or in several with its multiprocess mode.

    locks = connect(url, observers=[PrometheusMetrics()])
"""

from __future__ import annotations

import os
from functools import partial
from typing import Literal

from fencing_sdk._values.drivers import imported_from

with imported_from("prometheus", "prometheus_client"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.integrations._measures import COUNTED, HELP, SECONDS, LockLabel, MetricsObserver, Series

__all__ = ["PrometheusMetrics"]

_LABELS = ["lock", "recipe"]
_Mode = Literal["livesum", "max"]
"""Rule that makes one number of those of several processes: the sum over those that live, or the largest of all."""


class PrometheusMetrics(MetricsObserver):
    """
    An observer that keeps the metrics of all its clients.

    Make one for each registry: Prometheus refuses a second metric of the same name. The times are in seconds. Every
    metric has the labels ``lock`` and ``recipe``: ``lock``, ``semaphore``, ``reader``, ``writer``, ``multilock``,
    ``election``, ``job`` or ``row``.

    Args:
        registry: Where the metrics are registered; that of ``prometheus_client.REGISTRY`` by default.

        lock_label: From a name that no template made to its label ``lock``, which is ``other`` by default. ``str``
            keeps every such name: each is then a series of its own. The label of a decorated name is its template,
            such as ``report/{report_id}``.

    Raises:
        ConfigurationError: *lock_label* is not callable, or *registry* is not a registry or has these metrics already.
    """

    def __init__(self, *, registry: CollectorRegistry = REGISTRY, lock_label: LockLabel | None = None) -> None:
        super().__init__(self._of, lock_label)
        given: object = registry
        if not isinstance(given, CollectorRegistry):
            msg = f"registry must be a CollectorRegistry of prometheus_client, got {shown(given)}"
            raise ConfigurationError(msg)
        try:
            self._register(registry)
        except ValueError as error:
            msg = "registry has these metrics already; make one PrometheusMetrics and give it to every client"
            raise ConfigurationError(msg) from error

    def _register(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, labelnames=_LABELS, buckets=SECONDS, registry=registry)
        self._wait = histogram("fencing_wait_seconds", HELP["wait"])
        self._hold = histogram("fencing_hold_seconds", HELP["hold"])
        self._spare = histogram("fencing_renewal_spare_seconds", HELP["spare"])
        self._counters = {
            what: Counter(f"fencing_{what}", HELP[what], [*_LABELS, *(detail or ())[:1]], registry=registry)
            for what, detail in COUNTED.items()
        }
        self._last_success = _gauge(registry, "job_last_success_timestamp", "_seconds", mode="max")
        self._fence_raised = _gauge(registry, "fence_raised_timestamp", "_seconds", mode="max")
        self._held, self._waiting = _gauge(registry, "held"), _gauge(registry, "waiting")

    def _of(self, *labels: str) -> Series:
        series = Series(
            wait=self._wait.labels(*labels).observe,
            hold=self._hold.labels(*labels).observe,
            spare=self._spare.labels(*labels).observe,
            count=lambda what, word, more: self._counters[what].labels(*labels, *filter(None, [word])).inc(more),
            last_success=lambda at: self._last_success.labels(*labels).set(at),
            fence_raised=lambda at: self._fence_raised.labels(*labels).set(at),
        )
        held, waiting = self._held.labels(*labels), self._waiting.labels(*labels)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ:

            def move_gauges(more_waiting: int, more_held: int) -> None:
                waiting.inc(more_waiting)  # the files of several processes are added up, so each change is written
                held.inc(more_held)

            series.move_gauges = move_gauges
        else:
            held.set_function(lambda: series.held)
            waiting.set_function(lambda: series.waiting)
        return series


def _gauge(registry: CollectorRegistry, what: str, unit: str = "", mode: _Mode = "livesum") -> Gauge:
    return Gauge(f"fencing_{what}{unit}", HELP[what], _LABELS, multiprocess_mode=mode, registry=registry)
