"""A server or a worker of a test never outlives it, also one that is stopped; and what a run says in its last lines."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import children, end, spawn, state
from patience import wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) == "T", what="it is stopped")


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("command", [SLEEP, DEAF], ids=["hears", "deaf"])
def test_a_server_that_is_stopped_is_ended(command, politely, tmp_path, monkeypatch):
    monkeypatch.setattr("child_processes.STOP_PATIENCE", 1.0)
    process = spawn(command, folder=tmp_path, log=tmp_path / "log")
    stop(process.pid)
    end(process, politely=politely)
    assert process.returncode < 0
    assert state(process.pid) == ""


def test_a_server_that_is_stopped_hears_first_that_it_is_to_end(tmp_path):
    """It is waked for that: a server that cleans up behind itself does so."""
    says = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1, flush=True)"
    log = tmp_path / "log"
    process = spawn([sys.executable, "-c", f"{says}; time.sleep(600)"], folder=tmp_path, log=log)
    wait_until(log.read_text, what="it listens to signals")
    stop(process.pid)
    end(process)
    assert process.returncode == 7


def test_no_child_of_a_server_that_is_killed_stays_behind_stopped(tmp_path):
    """As the processes of PostgreSQL: each looks for its parent, but not while it is stopped."""
    looks = "import os, time\nwhile os.getppid() == {parent}: time.sleep(0.01)"
    starts = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
    starts += f"{looks!r}.format(parent=os.getpid())])"
    command = [sys.executable, "-c", f"{starts}; time.sleep(600)"]
    process = spawn(command, folder=tmp_path, log=tmp_path / "log")
    wait_until(lambda: children(process.pid), what="it has started a process")
    (child,) = children(process.pid)
    stop(process.pid)
    stop(child)
    end(process, politely=False)
    wait_until(lambda: state(child) in {"", "Z"}, what="its child has ended")


@pytest.mark.skipif(not shutil.which("setpriv"), reason="only Linux ends a process with its parent")
def test_a_worker_that_is_stopped_does_not_outlive_tests_that_are_killed():
    says = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    script = (
        "import os, signal, subprocess, sys; from child_processes import guarded; "
        f"worker = subprocess.Popen(guarded({says}), stdout=subprocess.PIPE); "
        "worker.stdout.readline(); os.kill(worker.pid, signal.SIGSTOP); "  # one that runs: its guard is behind it
        "print(worker.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: state(int(done.stdout)) in {"", "Z"}, what="the worker is dead")


SLOW = """
import asyncio
import pytest
from patience import wait_until

async def wait():
    async with asyncio.timeout(0.01):
        await asyncio.Event().wait()

def test_a_timeout():
    asyncio.run(wait())

def test_in_vain():
    wait_until(lambda: False, within=0.01)

def test_wrong():
    assert 1 == 2

@pytest.mark.parametrize("number", range(3))
def test_left_out(number):
    pytest.skip("etcd is missing: RUNLEVEL=1 apt-get install etcd-server")
"""


def test_the_last_lines_name_what_was_left_out_and_the_load_if_tests_failed_by_time(tmp_path):
    (tmp_path / "test_slow.py").write_text(SLOW)
    left_out, late = last_lines(tmp_path)
    assert left_out == "3 skipped: etcd is missing: RUNLEVEL=1 apt-get install etcd-server"
    assert late.startswith(
        f"2 of 3 failed by time, on {os.cpu_count()} cores with a load of 1.5 in the last minute, 2.5 in"
    )


def last_lines(folder: Path) -> list[str]:
    """Run the tests in *folder*, with a load of 1.5, 2.5 and 3.5; return the lines below those of pytest."""
    loaded = "import os\nos.getloadavg = lambda: (1.5, 2.5, 3.5)\n"
    (folder / "conftest.py").write_text(loaded + "from last_lines import pytest_terminal_summary\n")
    servers = Path(__file__).parent
    paths = os.pathsep.join(map(str, [servers, servers.parent / "support"]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", folder]
    done = subprocess.run([*command, folder], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if " skipped: " in line or " by time" in line]
