"""
Translates errors of PostgreSQL and its driver to the two errors of the contract: by SQLSTATE, or else by class.

See `fencing_sdk.backends._shared.error_translation` for what makes an error a refusal.
"""

from __future__ import annotations

import asyncio
from functools import partial

from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    one_line,
    verdict_by_class,
)
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.backends.postgresql import driver
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

BACKEND = "PostgresqlBackend"


class StandbyError(Exception):
    """The server is a standby."""


class ReadOnlyError(Exception):
    """The server is not a standby, and refuses writes in this session."""


class UnreadableRowError(Exception):
    """A function of the schema returned a row that no function of this version returns. The outcome is unknown."""


_NOT_OURS = "the schema has tables or functions that are not those of this version; set another schema"
_OTHER_SCHEMA = {"42883", "42P01", "42703", "42804", "42809", "3F000"}
_REFUSED = {
    *("28000", "28P01", "3D000", "42501", "42704", "22023", "22021", "22P05", "22003", "22008", "54000"),
    *("42939", "42601", "23514"),
    *_OTHER_SCHEMA,
}
"""The login, the database, a right, the schema or a value: permanent, and nothing was changed."""
_READ_ONLY = "the server takes no writes, because default_transaction_read_only is on for it, the database, or the role"
_HINTS: dict[str, str] = {
    "25006": _READ_ONLY,
    **dict.fromkeys(("40001", "40P01"), "the transaction was rolled back again and again"),
    "53300": "the server, the database or the role has no connection left",
    "55P03": "another transaction keeps the row of the lock locked",
    "57014": "the statement was cancelled; is statement_timeout very short?",
    "28P01": "wrong user or password",
    "42501": "the role lacks a permission: USAGE on the schema, or SELECT, INSERT, UPDATE and DELETE on its tables",
    "42704": "the URL has an option that neither libpq nor the server knows",
    "22023": "the URL has an option with a value that the server does not take",
    **dict.fromkeys(
        ("22021", "22P05"),
        "a name or a label has a character that the database cannot store; its encoding should be UTF8",
    ),
    **dict.fromkeys(_OTHER_SCHEMA, _NOT_OURS),
    "42601": "the server does not know a statement of the schema; it must be PostgreSQL 12 or newer",
    "23514": "the next token would not fit into 53 bits; is the server's clock right?",
}
"""Hints on what to do. Of any other error the text of the server, or of a pooler before it, is shown."""

CLASSES: tuple[tuple[type[BaseException], Verdict], ...] = (
    (StandbyError, (BackendUnavailableError, "a standby takes no writes; name the primary in the URL, or promote it")),
    (ReadOnlyError, (BackendUnavailableError, _READ_ONLY)),
    (UnreadableRowError, (BackendUnavailableError, _NOT_OURS)),
    (ConnectionAbandonedError, (BackendUnavailableError, "the connection was abandoned, or the backend was closed")),
    (driver.TargetNotMatched, (BackendUnavailableError, "no host matches target_session_attrs")),
    (driver.Disconnected, (BackendUnavailableError, "the connection broke")),
    (TimeoutError, (BackendUnavailableError, "the server did not answer while a connection was opened")),
    (asyncio.IncompleteReadError, (BackendUnavailableError, "the connection broke")),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)

_UNKNOWN: Verdict = (BackendUnavailableError, "PostgreSQL failed")


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*. A SQLSTATE counts more than a class."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, NoConnectionError):
        return BackendUnavailableError(BACKEND, operation, str(error))
    code = driver.code_of(error)
    kind, said = _UNKNOWN
    if code:
        kind = BackendRefusedError if code in _REFUSED else BackendUnavailableError
        said = _HINTS.get(code) or f"the server says: {one_line(*error.args[:1])}"
    if code not in _HINTS:
        kind, said = verdict_by_class(error, CLASSES, (kind, said))
    return kind(BACKEND, operation, f"{said} ({code or type(error).__name__})")


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
