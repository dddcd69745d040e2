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
    verdict_by_class,
)
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

BACKEND = "MysqlBackend"

GONE = {1053, 1927, 2006, 2013, 2055, 4031}
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
READ_ONLY = {1290, 1792, 1836}

_RIGHTS = (
    "the user lacks a right: SELECT, INSERT, UPDATE and DELETE on the tables fencing_..., and CREATE once, "
    "or run 'fencing init'"
)
_OTHER_TABLES = "its tables named fencing_... are not those of this version; drop them, or name another database"
_FULL = "the server, or the user, has no connection left; see max_connections and max_user_connections"
_LIMIT = (
    "the user has no connection left, or no statement for this hour; see max_user_connections, and the limits in "
    "SHOW CREATE USER"
)
_READ_ONLY: Verdict = (
    BackendUnavailableError,
    "the server takes no writes, because read_only is on, or transaction_read_only",
)
_TOO_LONG = "a statement took longer than max_statement_time or max_execution_time allows"
_LOGIN: Verdict = (
    BackendRefusedError,
    "wrong user or password, no such user at this host, or one that has to use TLS, which ?tls=true does",
)
_EXPIRED: Verdict = (BackendRefusedError, "the user's password has expired; ALTER USER sets a new one")
_LOCKED: Verdict = (BackendRefusedError, "the user's account is locked; ALTER USER ... ACCOUNT UNLOCK opens it")
_LOST: Verdict = (BackendUnavailableError, "the connection broke")

CODES: dict[int, Verdict] = {
    # Another try may help.
    1040: (BackendUnavailableError, _FULL),
    1203: (BackendUnavailableError, _FULL),
    1226: (BackendUnavailableError, _LIMIT),
    LOCK_WAIT: (
        BackendUnavailableError,
        "another transaction keeps the row of the lock, or of its fence, or the whole table, locked",
    ),
    1213: (BackendUnavailableError, "the transaction was rolled back again and again"),
    1020: (BackendUnavailableError, "the transaction was rolled back again and again"),
    1062: (BackendUnavailableError, "the transaction was rolled back again and again"),
    1180: (BackendUnavailableError, "the server could not commit"),
    3101: (BackendUnavailableError, "the server could not commit"),
    1021: (BackendUnavailableError, "the server's disk is full"),
    1114: (BackendUnavailableError, "the table of the locks is full"),
    1037: (BackendUnavailableError, "the server has no memory left"),
    1041: (BackendUnavailableError, "the server has no memory left"),
    1047: (BackendUnavailableError, "the node has no quorum"),
    1053: (BackendUnavailableError, "the server is shutting down"),
    1317: (BackendUnavailableError, "an operator interrupted the statement again and again"),
    1969: (BackendUnavailableError, _TOO_LONG),
    3024: (BackendUnavailableError, _TOO_LONG),
    1290: _READ_ONLY,
    1792: _READ_ONLY,
    1836: _READ_ONLY,
    1129: (BackendUnavailableError, "the server blocks this host after many errors; run FLUSH HOSTS there"),
    1184: (BackendUnavailableError, "the server ended the new connection, perhaps because its init_connect fails"),
    3032: (BackendUnavailableError, "the server is in offline_mode"),
    1927: _LOST,
    2003: (BackendUnavailableError, "no connection to the server"),
    2006: _LOST,
    2013: _LOST,
    2055: _LOST,
    4031: _LOST,
    # Another try cannot help.
    1044: (BackendRefusedError, "the database does not exist, or the user has no right to use it"),
    1045: _LOGIN,
    1698: _LOGIN,
    1820: _EXPIRED,
    1862: _EXPIRED,
    3118: _LOCKED,
    4151: _LOCKED,
    1130: (BackendRefusedError, "the server takes no connections from this host"),
    1049: (BackendRefusedError, "the database does not exist"),
    1046: (BackendRefusedError, "the URL names no database"),
    1142: (BackendRefusedError, _RIGHTS),
    1143: (BackendRefusedError, _RIGHTS),
    1054: (BackendRefusedError, _OTHER_TABLES),
    1136: (BackendRefusedError, _OTHER_TABLES),
    1146: (BackendRefusedError, _OTHER_TABLES),
    1364: (BackendRefusedError, _OTHER_TABLES),
    1064: (BackendRefusedError, "the server does not know a statement; it must be MySQL 8.0, MariaDB 10.6, or newer"),
    1153: (BackendRefusedError, "a text of the claim is longer than max_allowed_packet"),
    1231: (BackendRefusedError, "the server does not take one of the settings in driver"),
    1264: (BackendRefusedError, "a number of the claim cannot be stored"),
    1366: (BackendRefusedError, "a text of the claim cannot be stored"),
    1406: (BackendRefusedError, "a text of the claim is too long to be stored"),
    1665: (BackendRefusedError, "binlog_format is STATEMENT; set it to ROW or MIXED"),
    3098: (BackendRefusedError, "the server's group replication refuses the tables"),
    3159: (BackendRefusedError, "the server asks for TLS; write ?tls=true"),
}

CLASSES: tuple[tuple[type[BaseException], Verdict], ...] = (
    (ConnectionAbandonedError, (BackendUnavailableError, "the connection was abandoned, or the backend was closed")),
    (UnicodeError, (BackendRefusedError, "a text of the claim cannot be stored, because it is not valid Unicode")),
    (TimeoutError, (BackendUnavailableError, "the server did not answer while a connection was opened")),
    (asyncio.IncompleteReadError, _LOST),
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
    kind, hint = CODES.get(code) or verdict_by_class(error, CLASSES, _UNKNOWN)
    return kind(BACKEND, operation, f"{hint} ({code or type(error).__name__})")


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
