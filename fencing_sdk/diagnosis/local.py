"""Checks memory and SQLite: the file system of the file, and whether its locks exclude another process."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fencing_sdk._values.drivers import is_frozen
from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite.file import PATIENCE
from fencing_sdk.backends.sqlite.file_system import NETWORK, OVERLAY, VOLATILE, file_system_of, is_perhaps_network
from fencing_sdk.diagnosis.checks import ERROR, WARNING, Check, StoreDiagnosis, judged

_ELSEWHERE = "move the file to a local disk; for several machines, use a server: redis://, postgresql://, etcd://"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file, and how a client uses it."""

    path: str
    file_system: str
    durable: bool
    hybrid: bool
    locks_work: bool | None


_OTHER_PROCESS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
connection.execute("SELECT last FROM fencing_token").fetchall()
print("ready", flush=True)
sys.stdin.readline()
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError:
    print("refused")
else:
    print("entered")
"""


def locks_work(path: str) -> bool | None:
    """
    Return whether another process is refused the write lock of the file at *path* while this one has it.

    None means that it was not tested: the file cannot be opened, or this process cannot start another Python.
    """
    if is_frozen() or not Path(path).is_file():
        return None
    command = [sys.executable, "-I", "-c", _OTHER_PROCESS, path]
    with (
        suppress(OSError, sqlite3.Error, subprocess.TimeoutExpired),
        closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as connection,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other,  # noqa: S603  (our own text)
    ):
        assert other.stdin is not None  # it is a pipe, and so is the next
        assert other.stdout is not None
        if other.stdout.readline() != b"ready\n":
            return None
        connection.execute("BEGIN IMMEDIATE")  # for a moment: the other process is ready
        try:
            said, _ = other.communicate(b"\n", timeout=PATIENCE)
        finally:
            other.kill()
            connection.rollback()
        return said != b"entered\n"
    return None


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[FileFacts], ...] = (
    Check("sqlite.file-system", ERROR, lambda it: it.file_system in NETWORK,
        "{it.path} is on {it.file_system}", "machines do not see each other's locks there: two may hold one",
        _ELSEWHERE),
    Check("sqlite.file-system", WARNING, lambda it: is_perhaps_network(it.file_system),
        "{it.path} is on {it.file_system}", "if a network or a host is behind it, two machines may hold one lock",
        _ELSEWHERE),
    Check("sqlite.file-system", WARNING, lambda it: it.file_system in OVERLAY,
        "{it.path} is on {it.file_system}, in the container's own layer",
        "another container has another file, so both may hold one lock, and the file goes with the container",
        "mount a volume, and name a file in it"),
    Check("sqlite.file-system", ERROR, lambda it: it.file_system in VOLATILE and not it.hybrid,
        "{it.path} is on {it.file_system}, in memory", "a reboot forgets the last tokens, and tokens=counter "
        "repeats them", "move the file to a disk, such as /var/lib"),
    Check("sqlite.locks", ERROR, lambda it: it.locks_work is False,
        "two processes had the write lock of {it.path} at the same time",
        "the file system ignores file locks: two may hold one lock, and writers damage the file", _ELSEWHERE),
    Check("sqlite.synchronous", ERROR, lambda it: not it.durable and not it.hybrid,
        "synchronous is normal", "a power failure may forget the latest grants, and tokens=counter repeats theirs",
        "leave synchronous out, or write synchronous=full"),
)
# fmt: on


class SqliteDiagnosis(StoreDiagnosis[SqliteBackend]):
    """The checks of one file."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        path = self.backend._path
        kind = await asyncio.to_thread(file_system_of, Path(path))  # a network file system may hang
        works = await asyncio.to_thread(locks_work, path)
        return judged(CHECKS, FileFacts(f"{path!a}", kind, self.backend._durable, self.backend._hybrid, works))


class MemoryDiagnosis(StoreDiagnosis[MemoryBackend]):
    """The check of a table in memory."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        reason = "each worker of gunicorn or uvicorn has locks of its own, so all of them may hold one lock at once"
        fix = "for several processes use sqlite:// on one machine, or a server: redis://, postgresql://, etcd://"
        found = [Finding("memory.process", WARNING, "the locks are those of one process", reason, fix)]
        if not self.backend._hybrid:
            reason = "after a restart tokens repeat, so that a resource outside of the process accepts a stale writer"
            fix = "leave tokens out, or use a store with a memory of its own"
            found.append(Finding("memory.tokens", WARNING, "tokens is counter", reason, fix))
        return found
