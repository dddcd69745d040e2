"""
The folder of one resource on disk, opened: listing, locking, publishing, cleaning, reading.

Only file system calls belong here. Every call is relative to a directory handle that was
opened without following a link, so no name leads outside.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from fencing_sdk._values.clock import BootClock
from fencing_sdk.guards.files._generations import Generation, in_order

try:
    import fcntl
except ImportError:  # no flock on this system: FileGuard says so when it is built
    fcntl = None  # type: ignore[assignment]

HAS_FLOCK = fcntl is not None

_LOCK = ".lock"
_DRAFT = ".draft-"
_PATIENCE = 5.0
"""Seconds to wait for the folder's lock. It is held for the publishing alone, never while data is written."""
_POLL = 0.002


class ResourceFolder:
    """The folder of one resource. Made by `opened`; to be used in the thread that opened it."""

    def __init__(self, handle: int, parent: int) -> None:
        self._handle = handle
        self._parent = parent

    @classmethod
    @contextmanager
    def opened(cls, directory: str, folder: str, *, create: bool = False) -> Iterator[Self]:
        """
        Open *folder* of *directory*; *create* both if they are missing.

        Raises:
            FileNotFoundError: there is none: nothing was ever published.
            OSError: it is a symbolic link, or cannot be opened.
        """
        if create:
            Path(directory).mkdir(parents=True, exist_ok=True)
        with _closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as parent:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=parent)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            with _closing(os.open(folder, flags, dir_fd=parent)) as handle:
                yield cls(handle, parent)

    def last(self) -> Generation | None:
        """The generation that counts. Exact under the lock alone."""
        return next(reversed(in_order(self._names())), None)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Keep every other thread and process from publishing. The kernel releases the lock when a process dies.

        Raises:
            TimeoutError: another process keeps the lock for seconds, because it was stopped half way.
        """
        with _closing(self._open(_LOCK, os.O_RDWR | os.O_CREAT)) as lock:
            _wait_for(lock)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # not left to close(): a forked child may hold a copy of the handle

    @contextmanager
    def draft(self, data: bytes) -> Iterator[str]:
        """Write *data* durably to a file that no reader opens; yield its name, and remove it at the end."""
        name, handle = self._new_draft()
        with _closing(handle):
            try:
                with open(handle, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(handle)
                yield name
            finally:
                self._remove(name)

    def _new_draft(self) -> tuple[str, int]:
        """Make an empty draft that is locked as long as its writer lives, see `clean`."""
        while True:
            name = f"{_DRAFT}{uuid.uuid4().hex}"
            handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return name, handle
            os.close(handle)  # another writer removed it as abandoned before it was locked

    def publish(self, source: str, generation: Generation, *, first: bool) -> None:
        """
        Give the file *source* the name of *generation*, durably. Under the lock only.

        A link and not a rename: an existing generation is never overwritten, even after a mistake.
        """
        os.link(source, generation.name, src_dir_fd=self._handle, dst_dir_fd=self._handle, follow_symlinks=False)
        os.fsync(self._handle)
        if first:
            os.fsync(self._parent)

    def clean(self, keep: int) -> None:
        """
        Remove all but the newest *keep* generations, and the drafts of dead writers. Under the lock only.

        A file that cannot be removed stays, because the write is done. Strictly oldest first: a reader that missed
        the newest name while it listed finds the older one gone, and looks again.
        """
        names = self._names()
        with suppress(OSError):
            for generation in in_order(names)[:-keep]:
                self._remove(generation.name)
        for name in names:
            if name.startswith(_DRAFT):
                self._remove_abandoned(name)

    def _remove_abandoned(self, name: str) -> None:
        with suppress(OSError), _closing(self._open(name, os.O_RDWR)) as draft:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living writer holds it
            self._remove(name)

    @contextmanager
    def current(self) -> Iterator[tuple[Generation, int] | None]:
        """
        Open the generation that counts, and its file. Takes no lock unless the folder looks empty.

        A listing is no snapshot. But names go oldest first, so one that can still be opened after
        the listing is at least as new as what counted before it.
        """
        missed = None
        while (last := self.last() or self._last_for_sure()) is not None:
            try:
                handle = self._open(last.name, os.O_RDONLY)
            except FileNotFoundError:
                if last == missed:
                    raise OSError(errno.ESTALE, "the newest file is listed and cannot be opened") from None
                missed = last
                continue
            with _closing(handle):
                yield last, handle
            return
        yield None

    def _last_for_sure(self) -> Generation | None:
        """Look again under the lock: while names come and go, a listing may show none of them."""
        with self.locked():
            return self.last()

    def _names(self) -> list[str]:
        return os.listdir(self._handle)  # noqa: PTH208  (a handle, not a path)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self._handle)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)


@contextmanager
def _closing(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


def contents(handle: int) -> bytes:
    """Everything in an open file."""
    with open(handle, "rb", closefd=False) as file:
        return file.read()


def _wait_for(lock: int) -> None:
    clock, nap = BootClock(), threading.Event()
    end = clock.now() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now() >= end:
                reason = f"another process has kept the resource locked for {_PATIENCE:g} s; it may be stopped"
                raise TimeoutError(errno.ETIMEDOUT, reason) from None
        else:
            return
        nap.wait(_POLL)
