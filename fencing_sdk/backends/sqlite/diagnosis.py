"""What of a file, its folder and its file system breaks a promise. It is looked at from outside: nothing is opened."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from fencing_sdk._values.findings import Finding, error, note, warning

MOUNTS = Path("/proc/self/mounts")
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "ocfs2", "gfs2"}
_PERHAPS_NETWORK = ("fuse", "virtiofs")
_VOLATILE = {"tmpfs", "ramfs"}
_LEAST_FREE = 16 * 2**20
_OLDEST = (3, 24)
_OLDEST_FOR_GUARDS = (3, 35)


def judge_file(path: Path, *, durable: bool, hybrid: bool, mounts: Path = MOUNTS) -> list[Finding]:
    """Every finding about the file at *path*, which need not exist."""
    return [
        *_version(),
        *_access(path),
        *_file_system(path, _kind_of(path, mounts), hybrid=hybrid),
        *_space(path),
        *_synchronous(durable=durable, hybrid=hybrid),
    ]


def _version() -> Iterator[Finding]:
    what, mend = f"SQLite {sqlite3.sqlite_version}", "install a Python with a newer SQLite"
    if sqlite3.sqlite_version_info < _OLDEST:
        yield error("sqlite.version", what, "locks need 3.24", mend)
    elif sqlite3.sqlite_version_info < _OLDEST_FOR_GUARDS:
        yield note("sqlite.version", what, "locks work, and SqlGuard on SQLite needs 3.35", mend)


def _access(path: Path) -> Iterator[Finding]:
    folder = path.parent
    if not folder.is_dir():
        what, mend = f"the folder {str(folder)!a} does not exist", f"mkdir -p {str(folder)!a}, or correct the path"
        yield error("sqlite.folder", what, "no lock can be taken", mend)
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        what, mend = f"no permission to write into {str(folder)!a}", f"chown or chmod {str(folder)!a}"
        yield error("sqlite.folder", what, "SQLite keeps its log beside the file", mend)
    for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        if file.exists() and not os.access(file, os.R_OK | os.W_OK):
            what, mend = f"no permission to read and write {str(file)!a}", f"chown or chmod {str(file)!a}"
            yield error("sqlite.file", what, "no lock can be taken", mend)
    if path.exists() and path.stat().st_mode & stat.S_IWOTH:
        what, mend = f"every user of this machine may write {str(path)!a}", f"chmod o-w {str(path)!a}"
        yield note("sqlite.permissions", what, "any of them can delete leases", mend)


def _kind_of(path: Path, mounts: Path) -> str:
    """The kind of the file system at *path*; empty where the system does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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


def _file_system(path: Path, kind: str, *, hybrid: bool) -> Iterator[Finding]:
    elsewhere = "move the file to a local disk; for several machines, use a server: redis://, postgresql://, etcd://"
    if kind in _NETWORK:
        what, reason = f"{str(path)!a} is on {kind}", "machines do not see each other's locks there: two may hold one"
        yield error("sqlite.file-system", what, reason, elsewhere)
    elif kind.startswith(_PERHAPS_NETWORK):
        what, reason = f"{str(path)!a} is on {kind}", "if a network is behind it, two machines may hold one lock"
        yield warning("sqlite.file-system", what, reason, elsewhere)
    elif kind in _VOLATILE:
        severe = note if hybrid else error
        what = f"{str(path)!a} is on {kind}, in memory"
        reason = "a reboot ends all leases, and forgets the last tokens"
        yield severe("sqlite.file-system", what, reason, "move the file to a disk, such as /var/lib")


def _space(path: Path) -> Iterator[Finding]:
    if not path.parent.is_dir():
        return
    free = shutil.disk_usage(path.parent).free
    if free < _LEAST_FREE:
        what = f"{free / 2**20:.1f} MB are free in {str(path.parent)!a}"
        yield warning("sqlite.space", what, "a full disk refuses every grant and renewal", "free some of the disk")


def _synchronous(*, durable: bool, hybrid: bool) -> Iterator[Finding]:
    if durable:
        return
    severe = note if hybrid else error
    reason = "a power failure may forget the latest grants" + ("" if hybrid else ", and tokens=counter repeats theirs")
    yield severe(
        "sqlite.synchronous", "synchronous is normal", reason, "leave synchronous out, or write synchronous=full"
    )
