"""
A guard that is a small store of files: the token is in the file name, and readers take the highest.

    directory/invoices%2F42/0000000000000034.00000002.9f8a01c2
              the resource  the token        its third state, by this holder

Why no interleaving lets a lower token win:

1. A writer writes and syncs a draft first, unseen and without a lock, however long it takes.
2. It then takes the folder's lock (flock), looks at the highest name, decides, and links the draft
   to the next name: higher than every name there is. Deciding and publishing are one step.
3. A reader takes the highest name, without a lock. So what it reads never goes back.
4. `raise_to` publishes the data that counts once more, as a hard link under the new token. A write
   with a lower token is refused from then on, and it would not be read either.

A process that is killed leaves at most a draft, which the next writer removes; the kernel gives its
lock back. A process that is *stopped* inside step 2, which takes about one fsync, keeps others waiting; they
give up after 5 s with `TimeoutError`. No other writer can pass it, so that is safe.

For local POSIX file systems with hard links and flock. NFS serves flock from Linux 2.6.12 on, and
may lose it with its server; then only rule 3 holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

import anyio.to_thread

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name
from fencing_sdk._values.token_wire import check_token
from fencing_sdk.errors import ConfigurationError, UnsupportedError
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports, admitted
from fencing_sdk.guards.files._folder import HAS_FLOCK, ResourceFolder, contents
from fencing_sdk.guards.files._generations import check_holder, folder_of, following

__all__ = ["FileGuard"]


class FileGuard:
    """
    Stores the bytes of each resource, and refuses those of a stale token.

    Shared by all threads and processes that use one *directory*; no other program may write there.
    Every write is durable when it returns. Errors of the file system leave as `OSError`.

    Not promised: that a cancelled write did not happen. It runs in a worker thread to its end.

    Args:
        directory: Where the resources are kept, one folder for each. Made when it is missing.

        keep: How many generations of a resource stay, at least 1: the one that counts, and older
            ones that save slow readers a second look.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`; in the calling thread by the methods named ``_sync``.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
        UnsupportedError: the system has no flock.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2, observers: Sequence[Observer] = ()) -> None:
        if not HAS_FLOCK:
            msg = "FileGuard needs flock, which this system does not have"
            raise UnsupportedError(msg)
        self._directory = _check_directory(directory)
        self._keep = _check_keep(keep)
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
        with self._reports.of_refusals(checked):
            await anyio.to_thread.run_sync(self._write, resource, folder, checked, data)

    def write_sync(self, resource: str, token: int, data: bytes) -> None:
        """`write` for code without an event loop."""
        folder, checked, data = _check_folder(resource), _check_token(token), _check_data(data)
        with self._reports.of_refusals(checked):
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

    async def admit_all(self, tokens: Mapping[str, int]) -> NoReturn:  # noqa: ARG002
        """
        Refuse: each resource is a folder of its own, and no step publishes files in several of them.

        Raises:
            UnsupportedError: always. Write one file that holds all of it, or keep the data in a database.
        """
        msg = (
            "FileGuard checks and publishes one resource at a time; let one resource hold what several locks protect, "
            "or keep it in a database with SqlGuard.admit_all"
        )
        raise UnsupportedError(msg)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        folder, checked = _check_folder(resource), _check_token(token)
        with self._reports.of_refusals(checked):
            await anyio.to_thread.run_sync(self._raise_to, resource, folder, checked, abandon_on_cancel=True)
        self._reports.raised(resource, checked)

    def raise_to_sync(self, resource: str, token: int) -> None:
        """`raise_to` for code without an event loop."""
        folder, checked = _check_folder(resource), _check_token(token)
        with self._reports.of_refusals(checked):
            self._raise_to(resource, folder, checked)
        self._reports.raised(resource, checked)

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
            files.clean(self._keep)

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
            elif (fence, fence.holder) != (last.token, last.token.holder):
                files.publish(last.name, following(last, fence, has_data=last.has_data), first=False)
                files.clean(self._keep)

    def _read(self, folder: str) -> bytes | None:
        try:
            with ResourceFolder.opened(self._directory, folder) as files, files.current() as current:
                return contents(current[1]) if current is not None and current[0].has_data else None
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


def _check_token(token: object) -> Token:
    return check_holder(check_token(token))


def _check_data(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        msg = f"data must be bytes, not {type(data).__name__}"
        raise ConfigurationError(msg)
    return bytes(data)


def _check_directory(directory: object) -> str:
    if isinstance(directory, os.PathLike):
        directory = os.fspath(directory)
    if not isinstance(directory, str) or not directory or "\0" in directory:
        msg = "directory must be a path, such as 'reports' or pathlib.Path('/var/lib/app/reports')"
        raise ConfigurationError(msg)
    return directory


def _check_keep(keep: object) -> int:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        msg = "keep must be a number of generations, at least 1"
        raise ConfigurationError(msg)
    return keep
