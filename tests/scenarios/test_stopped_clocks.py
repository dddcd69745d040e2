"""A user's test that stops the clock, by freezegun or time-machine, stops no heartbeat and no wait. Real time."""

import asyncio
import sys
import threading
from datetime import UTC, datetime

import freezegun
import pytest
import time_machine
from event_log import Log
from patience import wait_until

import fencing_sdk.sync
from fencing_sdk import AcquireTimeoutError, LeaseLostError, connect
from fencing_sdk.events import Renewed

STOPPED = {
    "freezegun, past": lambda **options: freezegun.freeze_time("2020-01-01", **options),
    "freezegun, future": lambda **options: freezegun.freeze_time("2040-01-01", **options),
    "time-machine": lambda **_: time_machine.travel(datetime(2020, 1, 1, tzinfo=UTC), tick=False),
}
in_each_way = pytest.mark.parametrize("stopped", STOPPED.values(), ids=STOPPED)
BEATS = {"ttl": 10, "heartbeat_interval": 0.05}


@in_each_way
@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/locks.db"])
def test_the_background_thread_of_a_client_for_threads_goes_on(stopped, url, tmp_path, monkeypatch):
    """Also without uvloop, on which a clock of Python has no effect, and also after the clock goes on."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    log = Log()
    with fencing_sdk.sync.connect(url.format(tmp_path), observers=[log]) as locks:
        lease = locks.lock("a", **BEATS).acquire()
        with stopped():
            during = locks.lock("b", **BEATS).acquire()  # its timers are set now
            with pytest.raises(AcquireTimeoutError):
                locks.lock("a", wait=0.05).acquire()
            renewed_again(log)
        renewed_again(log)
        lease.check()
        during.check()


def renewed_again(log):
    seen = len(log.of(Renewed))
    wait_until(lambda: len(log.of(Renewed)) > seen + 2)


@in_each_way
async def test_the_client_for_tasks_goes_on_where_the_event_loop_does(stopped):
    log = Log()
    async with connect("memory://", observers=[log]) as locks:
        lease = await locks.lock("a", **BEATS).acquire()
        with stopped(real_asyncio=True):
            with pytest.raises(AcquireTimeoutError):
                await locks.lock("a", wait=0.05).acquire()
            await log.seen(Renewed, len(log.of(Renewed)) + 2)
        await log.seen(Renewed, len(log.of(Renewed)) + 2)
        lease.check()


async def test_a_client_renews_again_after_the_event_loop_stood_still():
    log = Log()
    async with connect("memory://", observers=[log]) as locks:
        lease = await locks.lock("a", **BEATS).acquire()
        with freezegun.freeze_time("2040-01-01"):
            for _ in range(20):
                await asyncio.sleep(0)
        async with locks.lock("b", **BEATS):
            await log.seen(Renewed, len(log.of(Renewed)) + 4)
        lease.check()


async def test_a_token_is_refused_after_the_ttl_although_the_event_loop_stands_still():
    async with connect("memory://") as locks:
        with freezegun.freeze_time("2020-01-01"):
            lease = await locks.lock("a", ttl=0.2).acquire()
            threading.Event().wait(0.25)
            with pytest.raises(LeaseLostError):
                lease.token  # noqa: B018
