"""
A guard that is a small store of files: the token is in the file name, and readers take the highest.

    directory/invoices%2F42/0000000000000034.00000002.9f8a01c2
              the resource  the token        its third state, by this holder; .empty: there is no data yet

Names sort like generations, so the last one of a plain ``ls`` is the one that counts.

Why no interleaving lets a lower token win:

1. A writer writes and syncs a draft first, unseen and without a lock, however long it takes.
2. It then takes the folder's lock (flock), looks at the highest name, decides, and links the draft
   to the next name: higher than every name there is. Deciding and publishing are one step.
3. A reader takes the highest name, without a lock. So what it reads never goes back.
4. `raise_to` publishes the data that counts once more, as a hard link under the new token. A write
   with a lower token is refused from then on, and it would not be read either.

A process that is killed leaves at most a draft, which the next writer removes; the kernel releases
its lock. A process that is *stopped* inside step 2, which takes about one fsync, keeps others waiting; they
give up after 5 s with `TimeoutError`. No other writer can pass it, so that is safe.

For local POSIX file systems with hard links and flock. NFS serves flock from Linux 2.6.12 on, and
may lose it with its server; then only rule 3 holds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import anyio.to_thread

from fencing_sdk._values.claim import check_name, safe_segment
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.token import Token, check_token, token_of_parts
from fencing_sdk.errors import ConfigurationError, UnsupportedError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards import Reports, admitted, is_unchanged

__all__ = ["FileGuard"]


class FileGuard:
    """
    Stores the bytes of each resource, and refuses those of a stale token.

    Shared by all threads and processes that use one *directory*; no other program may write there.
    Every write is durable when it returns. Errors of the file system leave as `OSError`.

    Not promised: that a cancelled write did not happen. It runs in a worker thread to its end.

    Args:
        directory: Where the resources are kept, one folder for each. Made when it is missing.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`; in the calling thread by the methods named ``_sync``.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
        UnsupportedError: the system has no flock.
    """

    def __init__(self, directory: str | os.PathLike[str], *, observers: Sequence[Observer] = ()) -> None:
        if not HAS_FLOCK:
            msg = "FileGuard needs flock, which this system does not have"
            raise UnsupportedError(msg)
        path: object = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if not isinstance(path, str) or not path or "\0" in path:
            msg = "directory must be a path, such as 'reports' or pathlib.Path('/var/lib/app/reports')"
            raise ConfigurationError(msg)
        self._directory = path
        self._reports = Reports(observers)

    async def write(self, resource: str, token: int, data: bytes) -> None:
        """
        Check *token* and replace the data of *resource*, as one step. Durable when it returns.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was changed.
            ConfigurationError: *resource*, *token* or *data* is not one.
            OSError: the file system failed, or a stopped process is in the way (`TimeoutError`).
        """
        folder, checked, data = _check_folder(resource), _check_token(token), _check_data(data)
        with self._reports.of_verdict({resource: checked}):
            await anyio.to_thread.run_sync(self._write, resource, folder, checked, data)

    def write_sync(self, resource: str, token: int, data: bytes) -> None:
        """`write` for code without an event loop."""
        folder, checked, data = _check_folder(resource), _check_token(token), _check_data(data)
        with self._reports.of_verdict({resource: checked}):
            self._write(resource, folder, checked, data)

    async def read(self, resource: str) -> bytes | None:
        """
        The data of *resource*, or None when there is none. Never older than what an earlier read saw.

        Raises:
            ConfigurationError: *resource* is not one.
            OSError: the file system failed.
        """
        return await anyio.to_thread.run_sync(self._read, _check_folder(resource), abandon_on_cancel=True)

    def read_sync(self, resource: str) -> bytes | None:
        """`read` for code without an event loop."""
        return self._read(_check_folder(resource))

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        folder, checked = _check_folder(resource), _check_token(token)
        with self._reports.of_verdict({resource: checked}):
            await anyio.to_thread.run_sync(self._raise_to, resource, folder, checked, abandon_on_cancel=True)
        self._reports.raised({resource: checked})

    def raise_to_sync(self, resource: str, token: int) -> None:
        """`raise_to` for code without an event loop."""
        folder, checked = _check_folder(resource), _check_token(token)
        with self._reports.of_verdict({resource: checked}):
            self._raise_to(resource, folder, checked)
        self._reports.raised({resource: checked})

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        return await anyio.to_thread.run_sync(self._highest, _check_folder(resource), abandon_on_cancel=True)

    # In a worker thread, or in the caller's.

    def _write(self, resource: str, folder: str, token: Token, data: bytes) -> None:
        with (
            ResourceFolder.opened(self._directory, folder, create=True) as files,
            files.draft(data) as draft,
            files.locked(),
        ):
            last = files.last()
            fence = admitted(resource, token, None if last is None else last.token)
            files.publish(draft, following(last, fence, has_data=True), first=last is None)
            files.clean()

    def _raise_to(self, resource: str, folder: str, token: Token) -> None:
        with (
            ResourceFolder.opened(self._directory, folder, create=True) as files,
            ExitStack() as drafts,
            files.locked(),
        ):
            last = files.last()
            fence = admitted(resource, token, None if last is None else last.token)
            if last is None:
                empty = drafts.enter_context(files.draft(b""))
                files.publish(empty, following(last, fence, has_data=False), first=True)
            elif not is_unchanged(fence, last.token):
                files.publish(last.name, following(last, fence, has_data=last.has_data), first=False)
                files.clean()

    def _read(self, folder: str) -> bytes | None:
        try:
            with ResourceFolder.opened(self._directory, folder) as files, files.current() as current:
                if current is None or not current[0].has_data:
                    return None
                with open(current[1], "rb", closefd=False) as file:
                    return file.read()
        except FileNotFoundError:
            return None

    def _highest(self, folder: str) -> Token | None:
        try:
            with ResourceFolder.opened(self._directory, folder) as files, files.current() as current:
                return None if current is None else current[0].token
        except FileNotFoundError:
            return None


def _check_folder(resource: object) -> str:
    return folder_of(check_name(resource, parameter="resource"))


def _check_data(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        msg = f"data must be bytes, not {type(data).__name__}"
        raise ConfigurationError(msg)
    return bytes(data)


_UNKNOWN_HOLDER = "-"
_EMPTY = ".empty"
_NAME = re.compile(r"([0-9]{16})\.([0-9]{8,})\.([0-9a-f]+|-)(\.empty)?", re.ASCII)

_FOLDER_LIMIT = 180
_FOLDER_KEPT = 140
"""Characters of a long resource name that stay readable; with its digest it is longer than the limit."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One published state of a resource: the fence, and the data that stands under it."""

    token: Token
    number: int
    """Counts the generations of one token, from 0."""
    has_data: bool

    @property
    def order(self) -> tuple[int, int]:
        """The key that generations are sorted by."""
        return int(self.token), self.number

    @property
    def name(self) -> str:
        """The file name."""
        holder = self.token.holder or _UNKNOWN_HOLDER
        return f"{int(self.token):016d}.{self.number:08d}.{holder}{'' if self.has_data else _EMPTY}"


def following(last: Generation | None, fence: Token, *, has_data: bool) -> Generation:
    """The generation after *last*, under *fence*."""
    number = last.number + 1 if last is not None and last.token == fence else 0
    return Generation(fence, number, has_data)


def in_order(names: Iterable[str]) -> list[Generation]:
    """The generations among file *names*, the one that counts last. Other files are ignored."""
    found = []
    for match in filter(None, map(_NAME.fullmatch, names)):
        token = token_of_parts(match[1].lstrip("0") or "0", None if match[3] == _UNKNOWN_HOLDER else match[3])
        if token is not None:
            found.append(Generation(token, int(match[2]), match[4] is None))
    return sorted(found, key=lambda generation: generation.order)


def folder_of(resource: str) -> str:
    """
    Encode a *resource* name into the name of its folder: one segment, at most 255 characters.

    What is too long is cut and completed by a digest, which makes it longer than every name that
    is not cut: no two resources share a folder.
    """
    segment = safe_segment(resource)
    if len(segment) <= _FOLDER_LIMIT:
        return segment
    return f"{segment[:_FOLDER_KEPT]}~{hashlib.sha256(resource.encode()).hexdigest()}"


def _check_token(token: object) -> Token:
    """Return *token* if its holder can be part of a file name: a digest such as ``lease.holder``, or None."""
    checked = check_token(token)
    holder: object = checked.holder
    if holder is not None and (not isinstance(holder, str) or token_of_parts("0", holder) is None):
        msg = f"the holder of a token must be up to 64 hex digits, such as lease.holder, got {shown(holder)}"
        raise ConfigurationError(msg)
    return checked


try:
    import fcntl
except ImportError:  # no flock on this system: FileGuard raises when it is built
    fcntl = None  # type: ignore[assignment]

HAS_FLOCK = fcntl is not None

_LOCK = ".lock"
_DRAFT = ".draft-"
_PATIENCE = 5.0
"""Seconds to wait for the folder's lock. It is held for the publishing alone, never while data is written."""
_POLL = 0.002


class ResourceFolder:
    """
    The folder of one resource. Made by `opened`; to be used in the thread that opened it.

    Every call of the file system is relative to a directory handle that was opened without following a link, so no name
    leads outside.
    """

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
        clock, pause = BootClock(), threading.Event()
        end = clock.now() + _PATIENCE
        with _closing(self._open(_LOCK, os.O_RDWR | os.O_CREAT)) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.now() >= end:
                        reason = f"another process has kept the resource locked for {_PATIENCE:g} s; it may be stopped"
                        raise TimeoutError(errno.ETIMEDOUT, reason) from None
                pause.wait(_POLL)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # not left to close(): a forked child may hold a copy of the handle

    @contextmanager
    def draft(self, data: bytes) -> Iterator[str]:
        """Write *data* durably to a file that no reader opens; yield its name, and remove it at the end."""
        while True:
            name = f"{_DRAFT}{uuid.uuid4().hex}"
            handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            fcntl.flock(handle, fcntl.LOCK_EX)  # as long as its writer lives, see `clean`
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)  # another writer removed it as abandoned before it was locked
        with _closing(handle):
            try:
                with open(handle, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(handle)
                yield name
            finally:
                self._remove(name)

    def publish(self, source: str, generation: Generation, *, first: bool) -> None:
        """
        Give the file *source* the name of *generation*, durably. Under the lock only.

        A link and not a rename: an existing generation is never overwritten, even after a mistake.
        """
        os.link(source, generation.name, src_dir_fd=self._handle, dst_dir_fd=self._handle, follow_symlinks=False)
        os.fsync(self._handle)
        if first:
            os.fsync(self._parent)

    def clean(self) -> None:
        """
        Remove all but the two newest generations, and the drafts of dead writers. Under the lock only.

        The second newest saves slow readers another look.

        A file that cannot be removed stays, because the write is done. Strictly oldest first: a reader that missed
        the newest name while it listed finds the older one gone, and looks again.
        """
        names = self._names()
        with suppress(OSError):
            for generation in in_order(names)[:-2]:
                self._remove(generation.name)
        for name in names:
            if name.startswith(_DRAFT):
                with suppress(OSError), _closing(self._open(name, os.O_RDWR)) as draft:
                    fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living writer holds it
                    self._remove(name)

    @contextmanager
    def current(self) -> Iterator[tuple[Generation, int] | None]:
        """
        Open the generation that counts, and its file. Takes no lock unless the folder looks empty.

        A listing is not a snapshot. But names go oldest first, so one that can still be opened after
        the listing is at least as new as what counted before it.
        """
        missed = None
        while True:
            last = self.last()
            if last is None:
                with self.locked():  # while names come and go, a listing may show none of them
                    last = self.last()
            if last is None:
                yield None
                return
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
