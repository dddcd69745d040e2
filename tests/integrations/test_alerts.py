"""The alert rules and the dashboard of the docs, with series that real processes expose."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Metric, Sum
from patience import until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from required_program import require_program

from fencing_sdk import connect
from fencing_sdk.integrations import _measures
from fencing_sdk.integrations.opentelemetry import OpenTelemetryMetrics
from fencing_sdk.integrations.prometheus import PrometheusMetrics
from fencing_sdk.recipes import Ran, Skipped

DOCS = Path(__file__).parents[2] / "docs"
RULES = DOCS / "alerts.yml"
Sample = tuple[str, dict[str, str], float]


def samples(exposition: str) -> list[Sample]:
    families = text_string_to_metric_families(exposition)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


@pytest.fixture
def promtool() -> Callable[..., None]:
    program = require_program("promtool", "prometheus")

    def run(*arguments: str | Path) -> None:
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_the_rules_pass_their_tests(promtool: Callable[..., None]) -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", DOCS / "alerts_test.yml")


def test_prometheus_understands_the_queries_of_the_dashboard(promtool: Callable[..., None], tmp_path: Path) -> None:
    """As rules: promtool needs a server to answer a query, and none to read it."""
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    filled = [query.replace("$__rate_interval", "5m").replace("$lock", ".*") for query in queries]
    recorded = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(filled)]
    (rules := tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", rules)


OF_OPENTELEMETRY = "fencing_spare_seconds_bucket"
"""The one metric that Prometheus gets under another name by OpenTelemetry."""

FRESH_PROCESS = """
import asyncio, sys
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from fencing_sdk import connect
from fencing_sdk.integrations.prometheus import PrometheusMetrics

async def main(registry=REGISTRY):
    locks = connect("memory://", observers=[PrometheusMetrics()])
    locks.job("nightly", at_least_for=60)(main)  # which nobody calls
    async with locks, locks.lock("invoices/42"):
        pass
    if "several" in sys.argv:
        multiprocess.MultiProcessCollector(registry := CollectorRegistry())
    print(generate_latest(registry).decode())

asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["one", "several"])
def first_use(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """What a process, alone or in the multiprocess mode, exposes after it has used a lock for the first time."""
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics"))}
    command = [sys.executable, "-W", "error", "-c", FRESH_PROCESS, request.param]
    environment = os.environ | (folder if request.param == "several" else {})
    return samples(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def rules() -> str:
    return re.sub(r"^ *#.*", "", RULES.read_text(), flags=re.MULTILINE)


def selectors() -> Iterator[tuple[str, str]]:
    """Each metric that a rule or a panel asks for, with the condition on its labels."""
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    queries = [target["expr"].replace("$lock", ".*") for panel in dashboard["panels"] for target in panel["targets"]]
    for query in [*re.findall(r"expr: (.*?)annotations:", rules(), re.DOTALL), *queries]:
        yield from re.findall(r"(fencing_\w+)(?:\{(.*?)\})?", query)


def chosen(sample: Sample, metric: str, condition: str) -> bool:
    name, labels, _ = sample
    fits = {
        "=": lambda label, wanted: label == wanted,
        "=~": lambda label, wanted: re.fullmatch(wanted, label),
        "!~": lambda label, wanted: not re.fullmatch(wanted, label),
    }
    asked = re.findall(r'(\w+)(=~|!~|!=|=)"(.*?)"', condition)
    return name == metric and all(fits[how](labels[label], wanted) for label, how, wanted in asked)


def test_what_the_rules_and_the_dashboard_ask_for_exists_from_the_first_use_on(first_use: list[Sample]) -> None:
    asked = set(selectors())
    assert len({metric for metric, _ in asked}) > 10
    for metric, condition in ((metric, condition) for metric, condition in asked if metric != OF_OPENTELEMETRY):
        found = [sample for sample in first_use if chosen(sample, metric, condition)]
        assert found, (metric, condition)
        if condition and metric.endswith("_total"):
            assert all(value == 0 for _, _, value in found)


def test_the_tests_of_the_rules_give_series_that_exist(first_use: list[Sample]) -> None:
    there = {(name.replace("renewal_", ""), tuple(sorted(labels.items()))) for name, labels, _ in first_use}
    given = re.findall(r"series: '(\w+)\{(.*?)\}'", (DOCS / "alerts_test.yml").read_text())
    assert len(given) > 20
    for name, labels in given:
        of_process = {label: value for label, value in re.findall(r'(\w+)="(.*?)"', labels) if label != "instance"}
        if of_process["recipe"] == "job":
            of_process["lock"] = "nightly"
        assert (name.replace("renewal_", ""), tuple(sorted(of_process.items()))) in there


async def test_exporters_of_opentelemetry_write_the_names_that_the_rules_and_the_dashboard_ask_for() -> None:
    reader = InMemoryMetricReader()
    observer = OpenTelemetryMetrics(meter_provider=MeterProvider([reader]))
    async with connect("memory://", observers=[observer]) as locks, locks.lock("a") as lease:
        locks.job("nightly", at_least_for=60)(asyncio.sleep)
        await lease.renew()
    data = reader.get_metrics_data()
    assert data is not None
    there = {
        written for metric in data.resource_metrics[0].scope_metrics[0].metrics for written in in_prometheus(metric)
    }
    assert {metric.replace("renewal_", "") for metric, _ in selectors()} <= there


def in_prometheus(metric: Metric) -> set[str]:
    """The names of its samples, by the rules of OpenTelemetry for metrics that are exported to Prometheus."""
    name = metric.name.replace(".", "_") + {"s": "_seconds"}.get(metric.unit, "")
    if isinstance(metric.data, Histogram):
        return {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return {f"{name}_total" if isinstance(metric.data, Sum) and metric.data.is_monotonic else name}


def test_the_page_says_what_each_alert_means() -> None:
    alerts = re.findall(r"alert: (\w+)", rules())
    assert re.findall(r"^\| `(Fencing\w+)` \|", (DOCS / "observing.md").read_text(), re.MULTILINE) == alerts


class Process:
    """A client of its own and its metrics, as in a process that Prometheus scrapes."""

    def __init__(self, folder: Path) -> None:
        self._registry = CollectorRegistry()
        observer = PrometheusMetrics(registry=self._registry)
        self.locks = connect(f"sqlite:///{folder}/locks.db", observers=[observer])

    def scrape(self) -> list[Sample]:
        return samples(generate_latest(self._registry).decode())


class Prometheus:
    """What a Prometheus has seen that scrapes once in each *step*, and which alerts would fire."""

    def __init__(self, step: str, **processes: Process) -> None:
        self._step = step
        self._processes = processes
        self._seen: dict[str, list[str]] = {}
        self._scrapes = 0

    def scrape(self, times: int) -> None:
        """See the processes so many times as they are now."""
        for instance, process in self._processes.items():
            for name, labels, value in process.scrape():
                shown = ", ".join(f'{label}="{word}"' for label, word in {"instance": instance, **labels}.items())
                values = self._seen.setdefault(f"{name}{{{shown}}}", [f"_x{self._scrapes}"] if self._scrapes else [])
                values.append(f"{value:.0f}x{times - 1}")
        self._scrapes += times

    def test(self, alerts: dict[str, list[str]]) -> str:
        """A test for promtool: which *alerts* fire at each time."""
        checks = [
            {
                "expr": "count by (alertname, instance, lock) (ALERTS)",
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": 1} for labels in firing],
            }
            for at, firing in alerts.items()
        ]
        series = [{"series": name, "values": " ".join(values)} for name, values in self._seen.items()]
        test = {"interval": self._step, "input_series": series, "promql_expr_test": checks}
        return json.dumps({"rule_files": [str(RULES)], "evaluation_interval": self._step, "tests": [test]})


async def test_the_first_loss_of_a_process_fires(tmp_path: Path, promtool: Callable[..., None]) -> None:
    one, other = Process(tmp_path), Process(tmp_path)
    prometheus = Prometheus("1m", one=one, other=other)
    async with one.locks as locks, other.locks as others:
        async with others.lock("b"):
            lease = await locks.lock("a").acquire()
        prometheus.scrape(10)
        assert await locks.revoke("a", token=lease.token, reason="a test")
        await until(lambda: not lease.held)
        prometheus.scrape(20)
    lost = '{alertname="FencingLeaseLost", instance="one", lock="other"}'
    (test := tmp_path / "test.yml").write_text(prometheus.test({"9m": [], "11m": [lost], "20m": []}))
    promtool("test", "rules", test)


async def test_a_job_that_a_process_skipped_is_silent_and_one_that_ran_nowhere_fires(
    tmp_path: Path, promtool: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10 h two processes call the one job, and nobody calls the other one."""
    one, other = Process(tmp_path), Process(tmp_path)
    prometheus = Prometheus("1h", one=one, other=other)

    async def work() -> None: ...

    called = [process.locks.job("called", at_least_for=60)(work) for process in (one, other)]
    one.locks.job("forgotten", at_least_for=60)(work)
    prometheus.scrape(10)
    monkeypatch.setattr(_measures, "wall_seconds", lambda: 36_000)
    async with one.locks, other.locks:
        outcomes = await asyncio.gather(*(call() for call in called))
    assert {type(outcome) for outcome in outcomes} == {Ran, Skipped}
    prometheus.scrape(30)
    again, forgotten = (f'{{alertname="FencingJobRanNowhere", lock="{lock}"}}' for lock in ("called", "forgotten"))
    alerts = {"24h": [], "26h": [forgotten], "34h": [forgotten], "36h": [again, forgotten]}
    (test := tmp_path / "test.yml").write_text(prometheus.test(alerts))
    promtool("test", "rules", test)
