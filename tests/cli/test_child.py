"""What no signal from outside can hit at the right moment."""

import os
import signal
from pathlib import Path

import pytest
from command_line import state, until

from fencing_sdk import Acquired, Event, connect
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.cli._child import Child
from fencing_sdk.cli._job import Job
from fencing_sdk.cli._store import StoreOptions
from fencing_sdk.cli.run import Supervision

STORE = StoreOptions("memory://").store()


async def test_a_signal_between_the_grant_and_the_start_starts_nothing(tmp_path: Path):
    job = Job(("touch", str(tmp_path / "ran")), "term", quiet=False)
    watch = Supervision(job, STORE)

    def interrupt(event: Event) -> None:
        if isinstance(event, Acquired):
            watch.receive(signal.SIGTERM)

    async with connect(MemoryBackend(), observers=[interrupt]) as locks:
        await watch.run(locks.lock("job"))
        assert await locks.inspect("job") is None
    assert (watch.fate, watch.code) == ("nothing was run", 128 + signal.SIGTERM)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("may_go_on", [True, False])
async def test_a_suspended_command_goes_on_only_with_its_lease(tmp_path: Path, may_go_on: bool):
    script = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    child = Child(["sh", "-c", script], os.environ, death_signal=signal.SIGKILL, may_go_on=lambda: may_go_on)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "the stop")
    child.suspended = True
    child.go_on()
    assert (state(pid) != "T") == may_go_on
    await child.stop(0)
    assert child.code == 128 + signal.SIGKILL


async def test_a_command_that_cannot_even_be_started_gives_the_lock_back(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    job = Job(("true", "x" * 2**22), "term", quiet=False)
    watch = Supervision(job, STORE)
    async with connect(MemoryBackend()) as locks:
        await watch.run(locks.lock("job"))
        assert await locks.inspect("job") is None
    assert watch.code == 126
    assert not caplog.records
    assert "cannot be started: Argument list too long" in capfd.readouterr().err
