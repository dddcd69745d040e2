"""A job in the schedulers that people have, as it is on the page: no adapter, and of two processes one runs."""

import asyncio
import importlib
import os
from contextlib import asynccontextmanager

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from inside import LAST_CALL
from taskiq import InMemoryBroker

from fencing_sdk import connect
from fencing_sdk.events import JobEnded
from fencing_sdk.recipes import Ran, Skipped

pytest_plugins = ["redis_fixtures"]

PATIENCE = 60.0
old_redis = pytest.mark.filterwarnings("ignore:Call to :DeprecationWarning")
"""arq was written for an earlier redis-py."""


BURST = {"burst": True, "poll_delay": 0.05, "handle_signals": False}
"""A worker of arq that ends when its queue is empty."""


class Process:
    """What one of several processes is made of: a client, a job, and what became of its calls."""

    def __init__(self, url):
        self.outcomes = []
        self.changed = asyncio.Event()
        self.locks = connect(url, observers=[self.note])
        self.began = []

    def note(self, event):
        if isinstance(event, JobEnded):
            self.outcomes.append(event.outcome.value)
            self.changed.set()

    def job(self, **options):
        @self.locks.job("nightly", **{"at_least_for": 60} | options)
        async def nightly(*context):
            self.began.append(asyncio.get_running_loop().time())
            return 7

        return nightly


@pytest.fixture(autouse=True)
def a_store_may_answer_late(monkeypatch):
    """A job asks once, and a busy machine may need more than a second for the answer."""
    monkeypatch.setattr(LAST_CALL, 10.0)


@asynccontextmanager
async def two_processes(url):
    one, two = Process(url), Process(url)
    async with one.locks, two.locks:
        yield one, two


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/locks.db"


async def until(processes, happened):
    async with asyncio.timeout(PATIENCE):
        while not happened():
            for process in processes:
                process.changed.clear()
            waits = [asyncio.create_task(process.changed.wait()) for process in processes]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


def counted(*processes):
    return sorted(outcome for process in processes for outcome in process.outcomes)


async def test_apscheduler_3(url):
    async with two_processes(url) as processes:
        values, schedulers = [], []
        for process in processes:
            scheduler = AsyncIOScheduler()
            scheduler.add_listener(lambda event: values.append(event.retval), EVENT_JOB_EXECUTED)
            scheduler.add_job(process.job(), "interval", seconds=0.1)
            scheduler.start()
            schedulers.append(scheduler)
        await until(processes, lambda: len(values) >= 4 and {Ran, Skipped} <= set(map(type, values)))
        for scheduler in schedulers:
            scheduler.shutdown(wait=False)
        await asyncio.sleep(0.05)
        assert counted(*processes).count("ran") == 1
        assert [value.value for value in values if isinstance(value, Ran)] == [7]


@pytest.fixture
def arq():
    """arq asks for redis-py below 6. uv overrides that, pip does not; in CI it must be there."""
    if "CI" not in os.environ:
        pytest.importorskip("arq", reason="only uv installs arq beside redis-py 7")
    importlib.import_module("arq.worker")
    return importlib.import_module("arq")


@old_redis
async def test_arq_keeps_what_a_call_returned(redis_server, arq):
    async with two_processes(redis_server.url) as (process, _):
        pool = await arq.create_pool(arq.connections.RedisSettings(port=redis_server.port))
        jobs = [await pool.enqueue_job("nightly") for _ in range(2)]
        await arq.Worker([arq.func(process.job(), name="nightly")], redis_pool=pool, **BURST).main()
        results = [await job.result(timeout=PATIENCE) for job in jobs]
        assert sorted(type(result).__name__ for result in results) == ["Ran", "Skipped"]
        await pool.aclose()


async def test_taskiq(url):
    async with two_processes(url) as processes:
        results = []
        for process in processes:
            broker = InMemoryBroker()
            nightly = broker.task(process.job())
            await broker.startup()
            task = await nightly.kiq()
            results.append((await task.wait_result(timeout=PATIENCE)).return_value)
            await broker.shutdown()
        assert [type(result) for result in results] == [Ran, Skipped]
        assert results[0].value == 7
