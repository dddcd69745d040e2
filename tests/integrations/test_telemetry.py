"""One story of locks, seen by Prometheus, by OpenTelemetry and in the log."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from fencing_sdk import (
    ConfigurationError,
    LockClient,
    LossReason,
    StaleTokenError,
    connect,
    current_lease,
    events,
    sync,
)
from fencing_sdk.events import (
    Event,
    JobOutcome,
    Lost,
    NotAcquiredReason,
    RenewalFailed,
    RenewalLate,
    Renewed,
    TokenMissing,
)
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations import _measures
from fencing_sdk.integrations._measures import LockLabel, MetricsObserver, Series
from fencing_sdk.integrations.logs import LogEvents
from fencing_sdk.integrations.opentelemetry import OpenTelemetryMetrics, OpenTelemetrySpans
from fencing_sdk.integrations.prometheus import PrometheusMetrics

ROOT = Path(__file__).parents[2]
Spans = tuple[TracerProvider, Callable[[], dict[str, ReadableSpan]]]
Numbers = dict[tuple[str, str, str], float]
"""By metric, lock and detail: a number, or how many values a histogram has. The recipe stands before another lock."""


def series_of(labels: Mapping[str, object]) -> str:
    lock, recipe = str(labels["lock"]), str(labels["recipe"])
    return lock if recipe == "lock" else f"{recipe} {lock}"


def prometheus(lock_label: LockLabel | None = None) -> tuple[MetricsObserver, Callable[[], Numbers]]:
    registry = CollectorRegistry()

    def numbers() -> Numbers:
        found: Numbers = {}
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_sum", "_created")):
                    continue
                metric = family.name.removeprefix("fencing_").removesuffix("_seconds").removeprefix("renewal_")
                detail = sample.labels.get("reason", sample.labels.get("outcome", ""))
                found[metric, series_of(sample.labels), detail] = sample.value
        return found

    return PrometheusMetrics(registry=registry, lock_label=lock_label), numbers


def opentelemetry(lock_label: LockLabel | None = None) -> tuple[MetricsObserver, Callable[[], Numbers]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    def numbers() -> Numbers:
        found: Numbers = {}
        data = reader.get_metrics_data()
        assert data is not None
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                with_details = point.attributes or {}
                detail = str(with_details.get("reason", with_details.get("outcome", "")))
                key = metric.name.removeprefix("fencing."), series_of(with_details), detail
                found[key] = point.count if hasattr(point, "count") else point.value
        return found

    return OpenTelemetryMetrics(meter_provider=provider, lock_label=lock_label), numbers


Given = Callable[[MetricsObserver], Callable[[Event], None]]
Library = Callable[..., tuple[MetricsObserver, Callable[[], Numbers]]]
LIBRARIES = pytest.mark.parametrize("library", [prometheus, opentelemetry])


async def a_story(*observers: Callable[[Event], None]) -> None:
    """Two reports, a try that finds a lock held, a job that ran and was skipped, a stale write, a loss at closing."""
    locks, guard = connect("memory://", observers=observers), MemoryGuard(observers=observers)

    @locks.locking("report/{report_id}")
    async def report(report_id: int) -> None: ...

    @locks.job("nightly/{day}", at_least_for=60)
    async def nightly(day: str) -> None: ...

    async with locks:
        await report(1)
        await report(2)
        lease = await locks.lock("plain").acquire()
        assert await locks.lock("plain").try_acquire() is None
        await nightly("mon")
        await nightly("mon")
        guard.admit("seats/42", 5)
        with pytest.raises(StaleTokenError):
            guard.admit("seats/42", 4)
    assert not lease.held


def itself(observer: MetricsObserver) -> Callable[[Event], None]:
    return observer


def inside_another(observer: MetricsObserver) -> Callable[[Event], None]:
    """It is then told of everything by events."""
    return observer.__call__


@LIBRARIES
@pytest.mark.parametrize("given", [itself, inside_another])
async def test_every_event_of_a_story_is_counted_under_its_template(
    library: Library, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measures, "wall_seconds", lambda: 1_800_000_000.5)
    observer, numbers = library()
    seen: list[str] = []
    await a_story(given(observer), lambda event: seen.append(event.kind))
    assert (seen.count("acquiring"), seen.count("acquired"), seen.count("released")) == (6, 4, 4)
    accepted = {("accepted", "other", ""): 1, ("fence_raised_timestamp", "other", ""): 1_800_000_000.5}
    assert {key: number for key, number in numbers().items() if number} == {
        ("wait", "report/{report_id}", ""): 2,
        ("wait", "job nightly/{day}", ""): 1,
        ("wait", "other", ""): 1,
        ("hold", "report/{report_id}", ""): 2,
        ("hold", "job nightly/{day}", ""): 1,
        ("hold", "other", ""): 1,
        ("not_acquired", "other", "held"): 1,
        ("not_acquired", "job nightly/{day}", "held"): 1,
        ("jobs", "job nightly/{day}", "ran"): 1,
        ("jobs", "job nightly/{day}", "skipped"): 1,
        ("job_last_success_timestamp", "job nightly/{day}", ""): 1_800_000_000.5,
        ("lost", "other", "closed"): 1,
        ("stale_rejected", "other", ""): 1,
        **({} if given is inside_another else accepted),
    }


async def every_recipe(locks: LockClient, name: str) -> None:
    """One lease of each recipe, under one name."""

    @locks.job(name, at_least_for=0.01)
    async def job() -> None: ...

    one_of_each = (
        locks.lock(name),
        locks.semaphore(name, permits=2),
        locks.rwlock(name).reader,
        locks.rwlock(name).writer,
        locks.multilock(name),
    )
    for lock in one_of_each:
        async with lock:
            pass
    async for term in locks.election(name):
        async with term:
            break
    await job()


def kept_apart(lock: str) -> set[tuple[str, str]]:
    """Each recipe of `every_recipe`, by its label *lock*. That of a job is always a template, so it keeps the name."""
    series = lock, *(f"{word} {lock}" for word in ("semaphore", "reader", "writer", "multilock", "election")), "job a"
    return {(metric, one) for metric in ("wait", "hold") for one in series}


def at_zero(numbers: Numbers, series: str) -> set[tuple[str, str]]:
    """What an alert may read of *series*: each counter that is there and has not moved, with its detail."""
    counters = {"lost", "not_acquired", "stale_rejected", "renewals_failed", "renewals_late", "jobs"}
    return {
        (what, detail) for (what, lock, detail), n in numbers.items() if what in counters and lock == series and not n
    }


COUNTERS = {
    *(("lost", str(reason)) for reason in LossReason),
    *(("not_acquired", str(reason)) for reason in NotAcquiredReason),
    *((what, "") for what in ("stale_rejected", "renewals_failed", "renewals_late")),
}
OUTCOMES = {("jobs", str(outcome)) for outcome in JobOutcome}


@LIBRARIES
@pytest.mark.parametrize("given", [itself, inside_another])
async def test_what_an_alert_reads_exists_at_zero_from_the_first_use_of_a_lock_on(
    library: Library, given: Given
) -> None:
    observer, numbers = library(str)
    async with connect("memory://", observers=[given(observer)]) as locks:
        async with locks.lock("a"):
            assert at_zero(numbers(), "a") == COUNTERS, "of a lock that is not a job"
            assert await locks.lock("a").try_acquire() is None
            assert at_zero(numbers(), "a") == COUNTERS - {("not_acquired", "held")}


@LIBRARIES
def test_what_an_alert_reads_of_a_job_exists_before_its_first_call(library: Library) -> None:
    async def work() -> None: ...

    for connect_, function in ((connect, work), (sync.connect, lambda: None)):
        observer, numbers = library(str)
        connect_("memory://", observers=[observer]).job("nightly/{{day}}", at_least_for=60)(function)
        assert at_zero(numbers(), "job nightly/{{day}}") == COUNTERS | OUTCOMES
        assert numbers()["job_last_success_timestamp", "job nightly/{{day}}", ""] == 0


@LIBRARIES
@pytest.mark.parametrize("given", [itself, inside_another])
async def test_each_recipe_is_a_series_of_its_own(library: Library, given: Given) -> None:
    observer, numbers = library()
    async with connect("memory://", observers=[given(observer)]) as locks:
        await every_recipe(locks, "a")
    found = numbers()
    assert {key[:2] for key, number in found.items() if number and "job" not in key[0]} == kept_apart("other")
    assert found["jobs", "job a", "ran"] == 1


@LIBRARIES
async def test_a_label_of_ones_own_is_for_names_that_no_template_made(library: Library) -> None:
    asked: list[str] = []

    def label(name: str) -> str:
        asked.append(name)
        return name.partition("/")[0]

    observer, numbers = library(label)
    await a_story(observer)
    found = {key[:2] for key, number in numbers().items() if number}
    assert found >= {("wait", "report/{report_id}"), ("wait", "job nightly/{day}"), ("wait", "plain")}
    assert set(asked) == {"plain", "seats/42"}, "the second by a guard"


@LIBRARIES
async def test_one_token_for_ever_does_not_look_like_a_fence_that_rises(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(_measures, "wall_seconds", lambda: next(times))
    observer, numbers = library(str)
    guard, raised = MemoryGuard(observers=[observer]), ("fence_raised_timestamp", "seats/42", "")
    for token, at in ((5, 1.0), (5, 1.0), (6, 2.0)):
        await guard.raise_to("seats/42", token)
        guard.write("seats/42", token, lambda: None)
        assert numbers()[raised] == at
    assert numbers()["accepted", "seats/42", ""] == 6
    async with connect("memory://", observers=[observer]) as locks, locks.lock("seats/43", fences=[MemoryGuard()]):
        assert numbers()["fence_raised_timestamp", "seats/43", ""] == 3.0, "by the client"
    observer(TokenMissing(name="seats/42", at=0.0, holder=None, resource="seats/42", required=True))
    assert numbers()["token_missing", "seats/42", ""] == 1


@LIBRARIES
async def test_the_gauges_tell_what_is_held_and_what_waits_now(library: Library) -> None:
    observer, numbers = library(str)
    async with connect("memory://", observers=[observer]) as locks, locks.lock("a"):
        waiter = asyncio.create_task(locks.lock("a").acquire())
        await asyncio.sleep(0)
        assert (numbers()["held", "a", ""], numbers()["waiting", "a", ""]) == (1, 1)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert (numbers()["held", "a", ""], numbers()["waiting", "a", ""]) == (1, 0)
    assert (numbers()["held", "a", ""], numbers()["waiting", "a", ""]) == (0, 0)


@LIBRARIES
def test_two_threads_that_see_a_lock_for_the_first_time_move_the_same_gauges(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread comes while this one makes the instruments of the lock."""
    observer, numbers = library(str)
    make, other = observer._make, threading.Thread(target=observer.acquiring, args=("a",))

    def interrupted(*labels: str) -> Series:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # with one series for both it waits for this thread
        return make(*labels)

    monkeypatch.setattr(observer, "_make", interrupted)
    observer.acquiring("a")
    other.join()
    assert numbers()["waiting", "a", ""] == 2
    for _ in range(2):
        observer.acquired("a", 0.1)
    assert (numbers()["waiting", "a", ""], numbers()["held", "a", ""]) == (0, 2)
    for _ in range(2):
        observer.released("a", 0.1)
    assert numbers()["held", "a", ""] == 0


def test_two_threads_that_count_the_same_thing_are_both_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread comes after this one has read the number, and before it writes the next one."""
    observer, numbers = opentelemetry(str)
    lost = Lost(name="a", at=1.0, holder="h", token=1, reason=LossReason.CLOSED)
    other = threading.Thread(target=observer, args=(lost,))

    class Interrupted(dict[tuple[str, str, str], int]):
        def __setitem__(self, key: tuple[str, str, str], number: int) -> None:
            if threading.current_thread() is not other:
                other.start()
                other.join(0.5)  # with a lock it waits for this thread
            super().__setitem__(key, number)

    observer.job_made("a")  # or the other thread would come when the series begins
    monkeypatch.setattr(observer._tallies["lost"], "_numbers", Interrupted())  # type: ignore[attr-defined]
    observer(lost)
    other.join()
    assert numbers()["lost", "a", "closed"] == 2


@LIBRARIES
async def test_no_event_is_made_for_metrics_of_what_goes_well(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(**_fields: object) -> None:
        raise AssertionError("an event was made")

    for kind in ("Acquiring", "Acquired", "Renewed", "Released"):
        monkeypatch.setattr(events, kind, made)
    observer, numbers = library(str)
    async with connect("memory://", observers=[observer]) as locks, locks.lock("a") as lease:
        await lease.renew()
    found = {key[0]: number for key, number in numbers().items() if number}
    assert found == {"wait": 1, "hold": 1, "spare": 1}


def test_a_registry_takes_the_metrics_once_and_nothing_else_is_one():
    registry = CollectorRegistry()
    PrometheusMetrics(registry=registry)
    with pytest.raises(ConfigurationError, match="make one PrometheusMetrics and give it to every client"):
        PrometheusMetrics(registry=registry)
    with pytest.raises(ConfigurationError, match="registry must be a CollectorRegistry"):
        PrometheusMetrics(registry="default")


@LIBRARIES
async def test_a_label_that_fails_is_logged_and_no_lock_fails(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    def label(name: str) -> str:
        raise LookupError(name)

    observer, _ = library(label)
    async with connect("memory://", observers=[observer]) as locks, locks.lock("a"):
        pass
    failed = [record.getMessage().rsplit(" ", 1)[1] for record in caplog.records if "failed on" in record.getMessage()]
    assert failed == ["acquiring", "acquired", "released"]


SEVERAL_PROCESSES = """
import asyncio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from fencing_sdk import connect
from fencing_sdk.integrations.prometheus import PrometheusMetrics

async def main():
    async with connect("memory://", observers=[PrometheusMetrics(lock_label=str)]) as locks, locks.lock("a"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        print(generate_latest(registry).decode())

asyncio.run(main())
"""


def test_gauges_of_several_processes_are_written_to_their_files(tmp_path: Path) -> None:
    heard = subprocess.run(
        [sys.executable, "-W", "error", "-c", SEVERAL_PROCESSES],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 'fencing_held{lock="a",recipe="lock"} 1.0' in heard
    assert 'fencing_waiting{lock="a",recipe="lock"} 0.0' in heard


@LIBRARIES
async def test_a_renewal_tells_how_much_time_was_left(library: Library) -> None:
    observer, numbers = library(str)
    observer(Renewed(name="a", at=1.0, holder="h", token=1, spare=4.0, deadline=15.0))
    observer(RenewalFailed(name="a", at=1.0, holder="h", token=1, error="no answer", remaining=3.0))
    observer(RenewalLate(name="a", at=1.0, holder="h", token=1, late=3.0, stack=None))
    found = {key[0]: number for key, number in numbers().items() if number}
    assert found == {"spare": 1, "renewals_failed": 1, "renewals_late": 1}


@LIBRARIES
def test_a_label_that_cannot_be_called_is_refused(library: Library) -> None:
    with pytest.raises(ConfigurationError, match="lock_label must be a callable"):
        library("report")  # type: ignore[arg-type]


@pytest.fixture
def spans() -> Iterator[tuple[TracerProvider, Callable[[], dict[str, ReadableSpan]]]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, lambda: {span.name: span for span in exporter.get_finished_spans()}
    provider.shutdown()


async def test_an_acquisition_and_its_lease_are_spans_under_the_callers(spans: Spans) -> None:
    provider, finished = spans
    async with connect("memory://", observers=[OpenTelemetrySpans(tracer_provider=provider)]) as locks:

        @locks.locking("report/{report_id}")
        async def report(report_id: int) -> tuple[int, str]:
            lease = current_lease()
            return lease.token, lease.holder

        with provider.get_tracer("app").start_as_current_span("request") as request:
            token, holder = await report(7)
    acquire, hold = finished()["acquire report/{report_id}"], finished()["hold report/{report_id}"]
    assert acquire.parent == hold.parent == request.get_span_context()
    assert dict(hold.attributes or {}) == {
        "fencing.lock.name": "report/7",
        "fencing.recipe": "lock",
        "fencing.holder": holder,
        "fencing.token": token,
        "fencing.mode": "lock",
        "fencing.release.confirmed": True,
    }
    assert acquire.end_time is not None
    assert hold.start_time is not None
    assert acquire.end_time <= hold.start_time
    assert {acquire.status.status_code, hold.status.status_code} == {StatusCode.UNSET}


async def test_a_loss_is_an_event_of_the_span_which_is_an_error_then(spans: Spans) -> None:
    provider, finished = spans
    async with connect("memory://", observers=[OpenTelemetrySpans(tracer_provider=provider, lock_label=str)]) as locks:
        lease = await locks.lock("a").acquire()
    assert not lease.held
    hold = finished()["hold a"]
    (lost,) = hold.events
    assert (lost.name, dict(lost.attributes or {})["fencing.reason"]) == ("fencing.lost", "closed")
    assert (hold.status.status_code, hold.status.description) == (StatusCode.ERROR, "lease lost: closed")


async def test_an_acquisition_that_times_out_is_an_error_and_one_that_asks_once_is_none(spans: Spans) -> None:
    provider, finished = spans
    observer = OpenTelemetrySpans(tracer_provider=provider, lock_label=str)
    async with connect("memory://", observers=[observer]) as locks, locks.lock("a"), locks.lock("b"):
        assert await locks.lock("a").try_acquire() is None
        with pytest.raises(TimeoutError):
            await asyncio.create_task(locks.lock("b", wait=0.01).acquire())
        asked, waited = finished()["acquire a"], finished()["acquire b"]
    assert (asked.status.status_code, waited.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert dict(waited.attributes or {})["fencing.not_acquired.reason"] == "timed_out"


async def test_events_are_logged_with_their_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "locks")
    await a_story(LogEvents(logging.getLogger("locks")))
    records = [vars(record) for record in caplog.records if record.name == "locks"]
    assert len(records) > 10
    loud = {record["fencing_kind"]: record for record in records if record["levelno"] == logging.WARNING}
    assert loud.keys() == {"lost", "stale_rejected"}
    lost = loud["lost"]
    assert (lost["message"], lost["fencing_name"], lost["fencing_reason"]) == ("lost 'plain'", "plain", "closed")
    assert isinstance(lost["fencing_token"], int)


def test_a_logger_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"logging\.getLogger"):
        LogEvents("locks")  # type: ignore[arg-type]
