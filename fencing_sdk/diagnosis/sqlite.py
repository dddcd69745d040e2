"""What of a file, its folder and its file system breaks a promise. It is looked at from outside: nothing is opened."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.diagnosis.checks import ERROR, NOTE, WARNING, Check, StoreDiagnosis, judged

MOUNTS = Path("/proc/self/mounts")
LEAST_FREE = 16 * 2**20
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "ocfs2", "gfs2"}
_PERHAPS_NETWORK = ("fuse", "virtiofs")
_VOLATILE = {"tmpfs", "ramfs"}
_ELSEWHERE = "move the file to a local disk; for several machines, use a server: redis://, postgresql://, etcd://"
_NEWER = "install a Python with a newer SQLite"


class FileFacts:
    """The file at *path*, which need not exist, and how a client uses it."""

    def __init__(self, path: Path, *, durable: bool = True, hybrid: bool = True) -> None:
        files = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]
        denied = [each for each in files if each.exists() and not os.access(each, os.R_OK | os.W_OK)]
        self.path, self.folder, self.denied = (
            f"{str(path)!a}",
            f"{str(path.parent)!a}",
            " ".join(map(ascii, map(str, denied))),
        )
        self.has_folder = path.parent.is_dir()
        self.is_closed = self.has_folder and not os.access(path.parent, os.W_OK | os.X_OK)
        self.is_open_to_all = path.exists() and path.stat().st_mode & stat.S_IWOTH
        self.free = shutil.disk_usage(path.parent).free / 2**20 if self.has_folder else float("inf")
        self.file_system = _file_system_of(path)
        self.durable = durable
        self.forgetting = NOTE if hybrid else ERROR
        self.repeat = "" if hybrid else ", and tokens=counter repeats theirs"
        self.sqlite, self.version = sqlite3.sqlite_version_info, sqlite3.sqlite_version


def _file_system_of(path: Path) -> str:
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
    Check("sqlite.version", ERROR, lambda it: it.sqlite < (3, 24),
        "SQLite {it.version}", "locks need 3.24", _NEWER),
    Check("sqlite.version", NOTE, lambda it: (3, 24) <= it.sqlite < (3, 35),
        "SQLite {it.version}", "locks work, and SqlGuard on SQLite needs 3.35", _NEWER),
    Check("sqlite.folder", ERROR, lambda it: not it.has_folder,
        "the folder {it.folder} does not exist", "no lock can be taken", "mkdir -p {it.folder}, or correct the path"),
    Check("sqlite.folder", ERROR, lambda it: it.is_closed,
        "no permission to write into {it.folder}", "SQLite keeps its log beside the file",
        "chown or chmod {it.folder}"),
    Check("sqlite.file", ERROR, lambda it: it.denied,
        "no permission to read and write {it.denied}", "no lock can be taken", "chown or chmod {it.denied}"),
    Check("sqlite.permissions", NOTE, lambda it: it.is_open_to_all,
        "every user of this machine may write {it.path}", "any of them can delete leases", "chmod o-w {it.path}"),
    Check("sqlite.file-system", ERROR, lambda it: it.file_system in _NETWORK,
        "{it.path} is on {it.file_system}", "machines do not see each other's locks there: two may hold one",
        _ELSEWHERE),
    Check("sqlite.file-system", WARNING, lambda it: it.file_system.startswith(_PERHAPS_NETWORK),
        "{it.path} is on {it.file_system}", "if a network is behind it, two machines may hold one lock", _ELSEWHERE),
    Check("sqlite.file-system", lambda it: it.forgetting, lambda it: it.file_system in _VOLATILE,
        "{it.path} is on {it.file_system}, in memory", "a reboot ends all leases, and forgets the last tokens",
        "move the file to a disk, such as /var/lib"),
    Check("sqlite.space", WARNING, lambda it: it.free * 2**20 < LEAST_FREE,
        "{it.free:.1f} MB are free in {it.folder}", "a full disk refuses every grant and renewal",
        "free some of the disk"),
    Check("sqlite.synchronous", lambda it: it.forgetting, lambda it: not it.durable,
        "synchronous is normal", "a power failure may forget the latest grants{it.repeat}",
        "leave synchronous out, or write synchronous=full"),
)
# fmt: on


class SqliteDiagnosis(StoreDiagnosis[SqliteBackend]):
    """The checks of one file."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        backend = self.backend
        look = partial(FileFacts, Path(backend._path), durable=backend._durable, hybrid=backend._hybrid)
        return judged(CHECKS, await asyncio.to_thread(look))  # a network file system may hang
