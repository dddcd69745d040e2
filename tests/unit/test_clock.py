"""The clocks: one that goes on during a suspend where there is one, and one that follows the loop."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fencing_sdk._values import clock as clock_module
from fencing_sdk._values.clock import BootClock, LoopClock, boot_identity, wall_micros, wall_seconds

has_boottime = hasattr(time, "CLOCK_BOOTTIME")


@pytest.mark.skipif(not has_boottime, reason="this system has no boot clock")
def test_deadlines_are_read_from_a_clock_that_goes_on_during_a_suspend():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= BootClock().now() <= time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.skipif(not has_boottime, reason="this system has one monotonic clock only")
def test_the_clock_follows_boottime_and_not_monotonic(monkeypatch):
    """They differ by the time that the machine was suspended; here they are driven apart."""
    monkeypatch.setattr(time, "monotonic", lambda: -1.0)
    assert BootClock().now() > 0


@pytest.mark.parametrize(
    ("system", "chosen"),
    [
        pytest.param({"CLOCK_BOOTTIME": 7, "CLOCK_MONOTONIC": 1}, 7, id="linux"),
        pytest.param({"CLOCK_MONOTONIC": 6, "CLOCK_UPTIME_RAW": 8}, 6, id="macos"),
        pytest.param({}, None, id="windows"),
    ],
)
def test_every_system_is_asked_for_the_clock_that_goes_on_during_a_suspend(system, chosen):
    assert clock_module._boot_clock_id(SimpleNamespace(**system)) == chosen


@pytest.mark.skipif(not hasattr(time, "CLOCK_MONOTONIC"), reason="this system has time.monotonic alone")
def test_without_boottime_the_systems_monotonic_clock_is_asked_and_not_pythons(monkeypatch):
    """On macOS the one goes on during a suspend and the other does not; here they are driven apart."""
    monkeypatch.setattr(time, "monotonic", lambda: -1.0)
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert before <= clock_module._reader(time.CLOCK_MONOTONIC)() <= time.clock_gettime(time.CLOCK_MONOTONIC)


def test_where_a_system_has_no_other_clock_it_is_pythons_monotonic():
    before = time.monotonic()
    assert before <= clock_module._reader(None)() <= time.monotonic()


def test_the_clock_never_goes_back_and_has_no_wall_time():
    clock = BootClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)
    assert readings[0] < wall_seconds() / 2


async def test_the_loop_clock_is_the_time_of_the_running_loop():
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert before <= LoopClock().now() <= loop.time()
    loop.time = lambda: 1234.5
    assert LoopClock().now() == 1234.5


def test_the_loop_clock_needs_a_loop():
    with pytest.raises(RuntimeError):
        LoopClock().now()


def test_wall_time_is_the_same_moment_in_both_units():
    before = time.time_ns() // 1000
    micros = wall_micros()
    assert before <= micros <= time.time_ns() // 1000
    assert abs(wall_seconds() - micros / 1e6) < 60
    assert isinstance(micros, int)


def test_a_token_from_the_wall_clock_fits_for_two_hundred_years():
    assert wall_micros() + 200 * 365 * 86_400 * 10**6 < 2**53


def test_the_boot_identity_is_stable_in_a_process_and_shared_by_the_processes_of_a_machine():
    mine = boot_identity()
    assert mine == boot_identity()
    assert mine.isprintable()
    command = "from fencing_sdk._values.clock import boot_identity; print(boot_identity())"
    child = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == mine


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="Linux tells its boot by this file")
def test_the_boot_identity_names_the_boot_and_the_time_namespace():
    boot, _, namespace = boot_identity().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace.startswith("time:[")


def test_a_system_without_a_boot_identity_says_so(monkeypatch):
    monkeypatch.setattr(clock_module, "Path", lambda path: Path("/nonexistent"))
    assert boot_identity() == "unknown"
