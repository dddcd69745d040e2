"""The file system that a file is on, as the kernel lists it, and what that means for locks."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mounts")

NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"),
    *("panfs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs"),
}
"""File systems that several machines have: each has a clock and a shared memory of its own."""
PERHAPS_NETWORK = {"drvfs", "fakeowner", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"}
"""Folders of a host in a virtual machine or in WSL. `is_perhaps_network` adds FUSE."""
VOLATILE = {"tmpfs", "ramfs"}
OVERLAY = {"overlay", "fuse.fuse-overlayfs"}


def is_perhaps_network(kind: str) -> bool:
    """Return whether *kind* may be a network file system, or one that a virtual machine shares with its host."""
    return kind in PERHAPS_NETWORK or (kind.startswith("fuse") and kind not in OVERLAY)


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
    named = kind.removeprefix("fuse.")
    return named if named in NETWORK else kind
