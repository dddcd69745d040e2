"""
Translates errors of the server and its driver to the two errors of the contract: by number, or else by class.

See `fencing_sdk.backends._shared.error_translation` for what makes an error a refusal.
"""

from __future__ import annotations

import asyncio
from functools import partial

from fencing_sdk._mysql.driver import code_of
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    one_line,
    verdict_by_class,
)
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

BACKEND = "MysqlBackend"

NOT_SENT = 2006
"""The driver's error where a connection had ended before a text was sent."""
GONE = {1053, 1927, NOT_SENT, 2013, 2055, 4031}
"""The connection has ended. 4031 and 1927: the server, or an operator, ended it."""
ROLLED_BACK = {1213, 1020, 1180, 3101, 1317, 1062}
"""
The transaction was rolled back: a deadlock, it wrote what another had changed, KILL interrupted a statement, or another
client has created the row of a lock at the same time.
"""
NO_TABLE = 1146
LOCK_WAIT = 1205
LOCKED = {LOCK_WAIT, 3572}
"""A row is locked, and was waited for, or was not to be waited for. MariaDB has one number for both."""
READ_ONLY = {1015, 1036, 1290, 1792, 1836, 1874}
"""1015 and 1036: a table, where ``innodb_read_only`` is on."""
_LOGIN = {1045, 1698}
_RIGHTS = {1142, 1143}
_OTHER_TABLES = {1054, 1136, NO_TABLE, 1364}
_REFUSED = {
    *(1044, 1046, 1049, 1064, 1130, 1153, 1231, 1264, 1366, 1406, 1665, 1820, 1862, 3098, 3118, 3159, 4151),
    *(_LOGIN | _RIGHTS | _OTHER_TABLES),
}
"""The login, the database, a right, the tables or a value: permanent, and nothing was changed."""
_OF_THE_DRIVER = range(2000, 3000)

_HINTS: dict[int, str] = {
    **dict.fromkeys((1040, 1203), "no connection is left; see max_connections and max_user_connections"),
    LOCK_WAIT: "another transaction keeps the row of the lock, or the whole table, locked",
    **dict.fromkeys(ROLLED_BACK, "the transaction was rolled back again and again"),
    **dict.fromkeys(READ_ONLY, "the server is read-only; a client looks for one that takes writes at its next try"),
    **dict.fromkeys(
        _LOGIN, "wrong user or password, no such user at this host, or one that has to use TLS, which ?tls=true does"
    ),
    1044: "the database does not exist, or the user has no right to use it",
    **dict.fromkeys(
        _RIGHTS,
        "the user lacks a right: SELECT, INSERT, UPDATE and DELETE on the tables fencing_..., and CREATE once, or run "
        "'fencing init'",
    ),
    **dict.fromkeys(
        _OTHER_TABLES,
        "its tables named fencing_... are not those of this version; drop them, or name another database",
    ),
    1064: "the server does not know a statement; it must be MySQL 8.0, MariaDB 10.6, or newer",
    1665: "binlog_format is STATEMENT; set it to ROW or MIXED",
    3159: "the server asks for TLS; write ?tls=true",
}
"""Hints on what to do. Of any other error the text of the server is shown, which has no value of a claim."""

_LOST = "the connection broke"
_CLASSES: tuple[tuple[type[BaseException], Verdict], ...] = (
    (ConnectionAbandonedError, (BackendUnavailableError, "the connection was abandoned, or the backend was closed")),
    (UnicodeError, (BackendRefusedError, "a text of the claim cannot be stored, because it is not valid Unicode")),
    (TimeoutError, (BackendUnavailableError, "the server did not answer while a connection was opened")),
    (asyncio.IncompleteReadError, (BackendUnavailableError, _LOST)),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)
_UNKNOWN: Verdict = (BackendUnavailableError, "the server failed")


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*. A number of the server counts more than a class."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, NoConnectionError):
        return BackendUnavailableError(BACKEND, operation, str(error))
    code = code_of(error)
    if not code:
        kind, said = verdict_by_class(error, _CLASSES, _UNKNOWN)
        return kind(BACKEND, operation, f"{said} ({type(error).__name__})")
    kind = BackendRefusedError if code in _REFUSED else BackendUnavailableError
    said = _LOST if has_ended(code) else _HINTS.get(code) or f"the server says: {one_line(*error.args[1:2])}"
    return kind(BACKEND, operation, f"{said} ({code})")


def locked(operation: str) -> BackendError:
    """Return the error of a call whose row another transaction keeps locked."""
    return BackendUnavailableError(BACKEND, operation, _HINTS[LOCK_WAIT])


def has_ended(code: int) -> bool:
    """Return whether an error with this number leaves a connection that cannot be used. The driver gives many none."""
    return not code or code in GONE or code in _OF_THE_DRIVER


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
