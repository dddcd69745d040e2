"""
Signs of life of the waiters, in a small file beside the database: `locks.db-waiters`.

A waiter gives a sign of life every second. It need not survive a crash, so it must not cost what a transaction costs:
the write lock, which renewals need, and sooner or later an fsync. Here it is eight bytes that the kernel keeps in
memory and writes to the disk when it likes. Each backend object that has waiters owns a slot, which the database
assigns; the slot holds the moment of the last sign, in microseconds of the boot clock.

The file may vanish at any time: it is made again by the next sign. What is not in it counts as never seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from struct import Struct

SUFFIX = "-waiters"

_SIGN = Struct("<q")
"""Aligned and within one page, so no reader finds half of it."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class SignsOfLife:
    """The file with the signs for one database. Used by the thread that made it, and by no other."""

    def __init__(self, database: Path) -> None:
        self._database = Path(os.path.realpath(database))  # processes that use other links to it share the file
        self._path = self._database.with_name(self._database.name + SUFFIX)
        self._file: int | None = None

    def give(self, slot: int, now: int) -> None:
        """
        Note a sign of life for *slot*.

        Raises:
            OSError: it cannot be written.
        """
        if not self._found() and not self._open():
            self._create()
        assert self._file is not None
        os.pwrite(self._file, _SIGN.pack(now), slot * _SIGN.size)

    def seen(self, slot: int) -> int:
        """The moment of the last sign for *slot*; 0 for never."""
        if not self._found() and not self._open():
            return 0
        assert self._file is not None
        sign = os.pread(self._file, _SIGN.size, slot * _SIGN.size)
        return int(_SIGN.unpack(sign)[0]) if len(sign) == _SIGN.size else 0

    def exist(self) -> bool:
        """Whether there is a file."""
        return self._path.exists()

    def remove(self) -> None:
        """Delete the file, because there are no waiters any more."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _found(self) -> bool:
        """Whether the file is open, and still the one that the other processes see."""
        if self._file is None:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            found = None
        if found is not None and os.path.samestat(found, os.fstat(self._file)):
            return True
        self.close()
        return False

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, _FLAGS)
        except FileNotFoundError:
            return False
        return True

    def _create(self) -> None:
        """Make the file, for the same users as the database, as SQLite does with its own two."""
        like = self._database.stat()
        try:
            self._file = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._file = os.open(self._path, _FLAGS)
            return
        if os.geteuid() == 0:
            os.fchown(self._file, like.st_uid, like.st_gid)
        os.fchmod(self._file, like.st_mode & 0o666)
