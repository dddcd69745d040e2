"""`fencing run --permits`, `--shared` and `--exclusive`: who runs beside whom, and what each of them is told."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest
from command_line import Fencing, alive, until

from fencing_sdk import connect

LONG = "60"
PROGRAM = f"{sys.executable} -m fencing_sdk"


def hold(fencing: Fencing, name: str, *options: str) -> dict[str, str]:
    """Start a command under the lock ``job`` that goes on; return what it finds in its environment."""
    script = f"env > {name}.part; echo $$ > {name}.pid; mv {name}.part {name}; exec sleep {LONG}"
    fencing.start("run", "job", *options, "--", "sh", "-c", script)
    until(lambda: fencing.path(name).exists(), f"the start of {name}")
    lines = fencing.path(name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("FENCING_"))


def refused(fencing: Fencing, *options: str) -> bool:
    done: subprocess.CompletedProcess[str] = fencing("run", "job", *options, "--", "true")
    assert done.returncode in {0, 75}
    return done.returncode == 75


def test_so_many_commands_run_at_a_time_each_with_a_number_and_a_token(fencing: Fencing):
    first, second = hold(fencing, "first", "--permits", "2"), hold(fencing, "second", "--permits", "2")
    assert (first["FENCING_PERMIT"], second["FENCING_PERMIT"]) == ("0", "1")
    assert first["FENCING_LOCK"] == second["FENCING_LOCK"] == "job"
    assert int(first["FENCING_TOKEN"]) < int(second["FENCING_TOKEN"])
    assert first["FENCING_HOLDER"] != second["FENCING_HOLDER"]
    third = fencing("run", "job", "--permits", "2", "--", "true")
    assert third.returncode == 75
    assert re.search("all 2 permits of 'job' were held, one of them by sh .*, nothing was run", third.stderr)
    assert refused(fencing)
    assert not refused(fencing, "--permits", "3")


def test_a_lock_within_a_permit_has_no_permit(fencing: Fencing):
    inner = [*PROGRAM.split(), "run", "other", "--", "env"]
    out = fencing("run", "job", "--permits", "2", "--pass-url", "--", *inner).stdout
    assert "FENCING_LOCK=other\n" in out
    assert "FENCING_PERMIT" not in out


async def test_those_who_share_a_lock_are_one_holder_to_a_guard_and_no_one_else_runs_beside_them(fencing: Fencing):
    first = await asyncio.to_thread(hold, fencing, "first", "--shared")
    second = await asyncio.to_thread(hold, fencing, "second", "--shared")
    assert first["FENCING_TOKEN"] == second["FENCING_TOKEN"]
    assert first["FENCING_HOLDER"] == second["FENCING_HOLDER"]  # else a guard would refuse one of them
    assert "FENCING_PERMIT" not in first
    async with connect(f"sqlite:///{fencing.store}") as locks, asyncio.TaskGroup() as tasks:
        assert len(await locks.holders("job")) == 2
        assert await asyncio.to_thread(refused, fencing, "--exclusive")
        assert await asyncio.to_thread(refused, fencing)
        options = ("run", "job", "--exclusive", "--wait", "forever", "--", "true")
        waiting = tasks.create_task(asyncio.to_thread(fencing, *options))
        while not await locks.waiters("job"):  # noqa: ASYNC110  (it is in the store)
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(refused, fencing, "--shared"), "it passed one who waits"
        for name in ("first", "second"):
            os.kill(await asyncio.to_thread(fencing.pid, f"{name}.pid"), signal.SIGTERM)
        assert (await waiting).returncode == 0


def test_exclusive_excludes_those_who_share(fencing: Fencing):
    hold(fencing, "first", "--exclusive")
    assert refused(fencing, "--shared")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a command has started")
def test_a_loss_does_not_stop_what_another_command_has_started_that_shares_the_lock(fencing: Fencing):
    """They have the same token."""
    orphan = f"(timeout {LONG} sh -c 'echo $$ > orphan.pid; exec sleep {LONG}' &); exec sleep {LONG}"
    other = fencing.start("run", "job", "--shared", "--", "sh", "-c", orphan)
    pid = fencing.pid("orphan.pid")
    done = fencing("run", "job", "--shared", "--max-hold", "500ms", "--", "sleep", LONG)
    assert done.returncode == 76
    assert alive(pid)
    assert other.poll() is None
    assert "detached" not in done.stderr


@pytest.mark.parametrize("options", [("--permits", "2"), ("--shared",), ("--exclusive",)], ids=" ".join)
def test_a_command_that_asks_for_a_share_of_the_lock_around_it_is_told_so(fencing: Fencing, options: tuple[str, ...]):
    inner = [*PROGRAM.split(), "run", "job", *options, "--wait", "forever", "--", "true"]
    done = fencing("run", "job", *options, "--pass-url", "--", *inner)
    assert done.returncode == 2
    assert "'job' is held by the fencing run around this one" in done.stderr


@pytest.mark.parametrize("option", [("--permits", "2"), ("--shared",), ("--exclusive",)], ids=" ".join)
def test_a_store_without_shares_means_69(fencing: Fencing, option: tuple[str, ...]):
    done = fencing("run", "job", *option, "--url", "kahuna://127.0.0.1:1", "--", "touch", "ran")
    assert done.returncode == 69
    assert done.stderr.endswith("nothing was run\n")
    assert not fencing.path("ran").exists()
