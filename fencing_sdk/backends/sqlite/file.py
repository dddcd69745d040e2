"""
One open connection to the file: how it is opened, what a transaction is, and which errors SQLite's codes become.

Used by the thread that made it, and by no other.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fencing_sdk._values.clock import JITTER, Clock
from fencing_sdk._values.drivers import packed_text
from fencing_sdk.backends._shared.error_translation import Verdict
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

BACKEND = "SqliteBackend"

_UNKNOWN: Verdict = (BackendUnavailableError, "SQLite failed")
_UNSTORABLE: Verdict = (BackendRefusedError, "a text or number of the claim cannot be stored")

VERDICTS: dict[int, Verdict] = {
    # Another try may help: the file is busy, or an operator can make room. A lease is worth the wait.
    sqlite3.SQLITE_BUSY: (BackendUnavailableError, "another process keeps the file's write lock"),
    sqlite3.SQLITE_LOCKED: (BackendUnavailableError, "another process keeps the file's write lock"),
    sqlite3.SQLITE_PROTOCOL: (BackendUnavailableError, "too many processes open the file at once"),
    sqlite3.SQLITE_IOERR: (BackendUnavailableError, "the disk failed"),
    sqlite3.SQLITE_FULL: (BackendUnavailableError, "the disk is full"),
    sqlite3.SQLITE_NOMEM: (BackendUnavailableError, "no memory is left"),
    sqlite3.SQLITE_CANTOPEN: (BackendUnavailableError, "the file cannot be opened; are too many files open?"),
    sqlite3.SQLITE_READONLY_DBMOVED: (BackendUnavailableError, "the file was moved or deleted"),
    # Another try will not help: this process cannot use the file.
    sqlite3.SQLITE_READONLY: (BackendRefusedError, "the file or its folder is read-only"),
    sqlite3.SQLITE_PERM: (BackendRefusedError, "no permission to use the file"),
    sqlite3.SQLITE_AUTH: (BackendRefusedError, "no permission to use the file"),
    sqlite3.SQLITE_NOTADB: (BackendRefusedError, "not an SQLite database; name another file, or move this one away"),
    sqlite3.SQLITE_CORRUPT: (
        BackendRefusedError,
        "the database is damaged; stop every process that uses it, delete it",
    ),
    sqlite3.SQLITE_ERROR: (BackendRefusedError, "its tables named fencing_... are not those of this version"),
    sqlite3.SQLITE_CONSTRAINT: (BackendRefusedError, "its tables named fencing_... are not those of this version"),
    sqlite3.SQLITE_TOOBIG: _UNSTORABLE,
}


def translated(path: object, operation: str, error: Exception) -> BackendError:
    """Make the error of the contract for *error*, by its class and code, most specific first."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    verdict = _UNSTORABLE if isinstance(error, UnicodeError | OverflowError) else VERDICTS.get(code)
    kind, hint = verdict or VERDICTS.get(code & 0xFF) or _UNKNOWN
    word = getattr(error, "sqlite_errorname", type(error).__name__)
    return kind(BACKEND, operation, f"{str(path)!a}: {hint} ({word})")


def busy(path: object, operation: str) -> BackendError:
    """Make the error for a call that ends while it waits for the write lock."""
    kind, hint = VERDICTS[sqlite3.SQLITE_BUSY]
    return kind(BACKEND, operation, f"{str(path)!a}: {hint}")


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another process has the lock that SQLite wanted, in any of its variants."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


PATIENCE = 4.0
"""Seconds to wait for the write lock; less than the engine waits for opening, so that its error has the reason."""
_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.005
"""
Seconds between two tries for the write lock. SQLite's own handler sleeps up to 0.1 s and starves:
of 16 processes in a tight loop some got nothing for 4 s, with these numbers the worst wait was 0.8 s.
"""
_FULL = "PRAGMA synchronous = FULL"
_NORMAL = "PRAGMA synchronous = NORMAL"
SYNCHRONOUS = {"full": _FULL, "normal": _NORMAL}
"""Makes a transaction with a grant durable. All others are never waited for: see `LockFile.transaction`."""

_SCHEMA = packed_text(__package__, "schema.sql")


class LockFile:
    """A database in WAL mode, opened and made ready."""

    def __init__(self, path: Path, *, synchronous: str, clock: Clock, busy: threading.Event | None = None) -> None:
        _check_openable(path)
        self._busy = busy or threading.Event()
        self._path = path
        self._clock = clock
        self._durable = SYNCHRONOUS[synchronous]
        self._never = threading.Event()
        # Transactions are begun by hand, and so is the waiting for the write lock.
        self._connection = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        try:
            self._prepare()
            self._identity = _identity(path)
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        (mode,) = self._patiently(lambda: self._connection.execute("PRAGMA journal_mode = WAL").fetchone())
        if mode != "wal":
            detail = f"{str(self._path)!a}: no write-ahead log here; use a file on a local disk"
            raise BackendRefusedError(BACKEND, "open", detail)
        self._patiently(lambda: self._connection.executescript(_SCHEMA))

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See what is committed, without the write lock. Another process may change it meanwhile."""
        self._connection.execute("BEGIN")
        try:
            self._patiently(lambda: self._connection.execute("SELECT last FROM fencing_token"))
            yield
        finally:
            self._connection.rollback()

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[float]:
        """
        Hold the write lock; yields the time, read while it is held, and commits when left cleanly.

        A clock read earlier could be seconds old when the lock is finally there, and would let an
        expired grant live or a later one start in the past.

        Only *durable* transactions wait for the disk. The others survive every crash of processes,
        and a power failure ends the boot and with it every ticket: only the last token must not be
        forgotten then.
        """
        self._patiently(partial(self._begin, self._durable if durable else _NORMAL))
        try:
            yield int(self._clock.now() * 1e6) / 1e6  # more digits take a third longer to write and to read
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise

    def _begin(self, synchronous: str) -> sqlite3.Cursor:
        self._connection.execute(synchronous)
        return self._connection.execute("BEGIN IMMEDIATE")

    def execute(self, statement: str, **values: object) -> sqlite3.Cursor:
        """Run one statement; values travel as parameters, never as text."""
        return self._connection.execute(statement, values)

    def moved(self) -> bool:
        """Return whether the path no longer leads to this file: then a lock in it excludes no other process."""
        try:
            return _identity(self._path) != self._identity
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _patiently(self, attempt: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        end = self._clock.now() + PATIENCE
        try:
            while True:
                try:
                    return attempt()
                except sqlite3.OperationalError as error:
                    if not is_busy(error) or self._clock.now() >= end:
                        raise
                self._busy.set()
                self._never.wait(JITTER.uniform(_SHORTEST_PAUSE, _LONGEST_PAUSE))
        finally:
            self._busy.clear()


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _check_openable(path: Path) -> None:
    """Refuse what no retry will change; SQLite itself says "unable to open" to all of it."""
    folder, file = str(path.parent), str(path)
    if not path.parent.is_dir():
        problem = f"the folder {folder!a} does not exist; create it (a mistyped path would be a second lock service)"
    elif path.exists() and not path.is_file():
        problem = f"{file!a} is not a file; name a file in a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"no permission to write into {folder!a}, where SQLite keeps its log beside the file"
    elif path.exists() and not os.access(file, os.R_OK | os.W_OK):
        problem = f"no permission to read and write {file!a}"
    else:
        return
    raise BackendRefusedError(BACKEND, "open", problem)
