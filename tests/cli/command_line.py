"""The command line as a user starts it, and patience for what it does."""

import getpass
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from fencing_sdk.cli._app import run_app  # noqa: F401  (the tests of commands take these from here)
from fencing_sdk.cli._options import StoreOptions, parse_duration  # noqa: F401
from fencing_sdk.cli._streams import Exit  # noqa: F401

PATIENCE = 300.0
"""Seconds: for what hangs. A process takes more than twenty to start beside a few dozen others on two cores."""


COMPILED = Path(tempfile.gettempdir()) / f"fencing-sdk-test-pycache-{getpass.getuser()}"


def until(happened: Callable[[], object], what: str = "it") -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def state(pid: int) -> str:
    """One letter of the kernel's: T is stopped, Z has ended and was not reaped, X is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    return state(pid) not in {"Z", "X"}


class Fencing:
    """The command line, run as a user runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.store = folder / "locks.db"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("FENCING_")}
        for size in ("COLUMNS", "LINES"):  # readline exports them to the workers of a parallel run
            inherited.pop(size, None)
        self.environment = inherited | {
            "XDG_STATE_HOME": str(self.state),
            "FENCING_URL": f"sqlite:///{self.store}",
            "NO_COLOR": "1",
            "PYTHONWARNINGS": "error",
            # Compiled once for all tests and workers, also where nothing may be compiled: it takes longer than they do.
            "PYTHONPYCACHEPREFIX": str(COMPILED),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        defaults = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(
            [sys.executable, "-m", "fencing_sdk", *arguments], **{**defaults, **pipes, **options}
        )
        self._started.append(process)
        return process

    def path(self, name: str) -> Path:
        return self.folder / name

    def appears(self, name: str) -> str:
        """Wait for a file that the command writes when it has come that far; return its text."""
        path = self.path(name)
        until(lambda: path.exists() and path.read_text().endswith("\n"), f"the file {name}")
        return path.read_text().strip()

    def pid(self, name: str) -> int:
        return int(self.appears(name))

    def take_away(self) -> None:
        """End every grant behind the holders' backs: their next renewal is refused."""
        with closing(sqlite3.connect(self.store, timeout=5)) as file, file:
            assert file.execute("DELETE FROM fencing_line").rowcount

    def clean_up(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()  # unread: what a test has left behind may hold the other end for a minute
        for path in self.folder.glob("*.pid"):
            with suppress(OSError, ValueError):
                pid = int(path.read_text())
                if Path(f"/proc/{pid}/cwd").samefile(self.folder):  # else the number is another process's by now
                    os.kill(pid, signal.SIGKILL)
