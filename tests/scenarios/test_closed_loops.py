"""
An event loop that was closed while a client was open in it: what it held is released from the next loop.

`asyncio.run` ends every task before it closes its loop. Other runners do not, and some test tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest

from fencing_sdk import LeaseLostError, LockClient, connect

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the sockets of the closed loop
    # Python ends the coroutines of the closed loop when they are collected, and some of them need a loop for that.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


@pytest.fixture(params=["postgresql", "etcd", "zookeeper", "kahuna"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a server."""
    return request.getfixturevalue(f"{request.param}_server").url


BOUND = 8.0
"""Seconds that closing takes at most, with each of its steps."""


async def hold(client: LockClient) -> None:
    async with client.lock("loop/body", ttl=30):
        await asyncio.sleep(3600)


async def begin(client: LockClient) -> list[object]:
    """Open the client, hold two locks, and wait for one: return what must not be collected before the next loop."""
    await client.__aenter__()
    handle = await client.lock("loop/handle", ttl=30).acquire()
    working = [hold(client), client.lock("loop/handle", ttl=30).acquire(), handle.wait_lost()]
    tasks = [asyncio.create_task(work) for work in working]
    await asyncio.sleep(0.5)  # the body works, and the waiter stands in line
    async with asyncio.timeout(20):
        while await client.inspect("loop/body") is None:  # noqa: ASYNC110  (the store announces no grant)
            await asyncio.sleep(0.01)
    return [handle, *tasks, *asyncio.all_tasks()]


async def close_and_use(client: LockClient) -> float:
    began = time.monotonic()
    await client.aclose()
    took = time.monotonic() - began
    async with client:
        assert await client.inspect("loop/handle") is None
        async with client.lock("loop/body", ttl=30, wait=0) as lease:
            lease.check()
    return took


def check(url: str, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(url)
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(begin(client))
    loop.close()
    took = asyncio.run(close_and_use(client))
    assert took < BOUND
    with pytest.raises(LeaseLostError):
        kept[0].check()
    for task in kept:
        if isinstance(task, asyncio.Task):
            task._log_destroy_pending = False
            with contextlib.suppress(RuntimeError):
                task.get_coro().close()
    del kept, task, loop, client
    gc.collect()
    assert [record for record in caplog.records if record.name == "fencing_sdk"] == []


def test_locks_of_a_closed_loop_are_released_from_the_next_one(url, caplog):
    check(url, caplog)


def test_so_are_those_of_one_machine(tmp_path, caplog):
    check("memory://", caplog)
    check(f"sqlite:///{tmp_path}/locks.db", caplog)


def test_so_are_those_on_redis(redis_server, caplog):
    check(redis_server.url, caplog)


def test_so_are_those_on_mysql(mysql_server, caplog):
    check(mysql_server.url, caplog)
