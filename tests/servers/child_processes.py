"""Processes that do not outlive the tests: not after an exit, not after Ctrl-C, and on Linux not after ``kill -9``."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_PATIENCE = 10.0

WARNINGS = ("-W", "error", "-W", "ignore:This process (pid=:DeprecationWarning")
"""Options of a Python that forks beside threads, as tests of forks want it to: from 3.15 on the warning is an error."""

_running: set[subprocess.Popen[bytes]] = set()
_owner = os.getpid()
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
"""Linux ends a child when the *thread* that made it ends, so all children are made by one that stays."""


def children(pid: int) -> list[int]:
    """The processes that *pid* has started. A server process leads a session of its own, so a group has only one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue  # it ended while we looked
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def state(pid: int) -> str:
    """R, S, D, T (stopped), Z, ...; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def guarded(command: Sequence[str]) -> list[str]:
    """Return *command* so that Linux kills its process, even a stopped one, when the thread that starts it ends."""
    return [*(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []), *command]


def spawn(command: Sequence[str], *, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start *command* in *folder* with its output in *log*, in a group of its own: Ctrl-C is for the tests alone."""

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                guarded(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    process = _spawner.submit(start).result()
    _running.add(process)
    return process


def end(process: subprocess.Popen[bytes], *, politely: bool = True) -> None:
    """Stop *process*, with SIGTERM if it listens to that in time, and collect it."""
    if process.poll() is None and politely:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            politely = False
    if process.poll() is None and not politely:
        left = children(process.pid)
        process.kill()
        for child in left:  # one that is stopped must wake to see that its parent has gone, as those of PostgreSQL do
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)
    process.wait()
    _running.discard(process)


@atexit.register
def _end_all() -> None:
    if os.getpid() == _owner:
        for process in list(_running):
            end(process, politely=False)


class ServerProcess:
    """
    A server that is one process at a time, in a folder with its log.

    The class sets `folder` and `_process`, and brings `start` and `close`.
    """

    folder: Path
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server wrote, for a failure message."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server was not started"
        self._process.send_signal(number)
