"""From SQLite's error codes to the two errors of the contract: see `fencing_sdk.backends._shared.error_translation`."""

from __future__ import annotations

import sqlite3

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
    kind, hint = _verdict(error)
    word = getattr(error, "sqlite_errorname", type(error).__name__)
    return kind(BACKEND, operation, f"{str(path)!a}: {hint} ({word})")


def _verdict(error: Exception) -> Verdict:
    if isinstance(error, UnicodeError | OverflowError):
        return _UNSTORABLE
    code: int = getattr(error, "sqlite_errorcode", 0)
    return VERDICTS.get(code) or VERDICTS.get(code & 0xFF) or _UNKNOWN


def busy(path: object, operation: str) -> BackendError:
    """Make the error for a call that ends while it waits for the write lock."""
    kind, hint = VERDICTS[sqlite3.SQLITE_BUSY]
    return kind(BACKEND, operation, f"{str(path)!a}: {hint}")


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process has the lock that SQLite wanted, in any of its variants."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
