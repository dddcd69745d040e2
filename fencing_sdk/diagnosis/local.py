"""Checks memory and SQLite. A file and its file system are examined from outside: nothing is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.diagnosis.checks import ERROR, WARNING, Check, StoreDiagnosis, judged

MOUNTS = Path("/proc/self/mounts")
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "ocfs2", "gfs2"}
_PERHAPS_NETWORK = ("fuse", "virtiofs")
_VOLATILE = {"tmpfs", "ramfs"}
_ELSEWHERE = "move the file to a local disk; for several machines, use a server: redis://, postgresql://, etcd://"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file, and how a client uses it."""

    path: str
    file_system: str
    durable: bool
    hybrid: bool


def file_system_of(path: Path) -> str:
    """Return the kind of the file system at *path*; empty where the system does not show it."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    whole = path.absolute().resolve()
    best, kind = -1, ""
    for line in lines:
        words = line.split(" ")
        point = Path(words[1].replace("\\040", " "))
        if whole.is_relative_to(point) and len(point.parts) >= best:  # the last mount at a point covers the others
            best, kind = len(point.parts), words[2]
    return kind


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[FileFacts], ...] = (
    Check("sqlite.file-system", ERROR, lambda it: it.file_system in _NETWORK,
        "{it.path} is on {it.file_system}", "machines do not see each other's locks there: two may hold one",
        _ELSEWHERE),
    Check("sqlite.file-system", WARNING, lambda it: it.file_system.startswith(_PERHAPS_NETWORK),
        "{it.path} is on {it.file_system}", "if a network is behind it, two machines may hold one lock", _ELSEWHERE),
    Check("sqlite.file-system", ERROR, lambda it: it.file_system in _VOLATILE and not it.hybrid,
        "{it.path} is on {it.file_system}, in memory", "a reboot forgets the last tokens, and tokens=counter "
        "repeats them", "move the file to a disk, such as /var/lib"),
    Check("sqlite.synchronous", ERROR, lambda it: not it.durable and not it.hybrid,
        "synchronous is normal", "a power failure may forget the latest grants, and tokens=counter repeats theirs",
        "leave synchronous out, or write synchronous=full"),
)
# fmt: on


class SqliteDiagnosis(StoreDiagnosis[SqliteBackend]):
    """The checks of one file."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        path = Path(self.backend._path)
        kind = await asyncio.to_thread(file_system_of, path)  # a network file system may hang
        return judged(CHECKS, FileFacts(f"{str(path)!a}", kind, self.backend._durable, self.backend._hybrid))


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
