"""
Translates errors of PostgreSQL and its driver to the two errors of the contract: by SQLSTATE, or else by class.

See `fencing_sdk.backends._shared.error_translation` for what makes an error a refusal.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.backends.postgresql.connection import driver
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

BACKEND = "PostgresqlBackend"


class StandbyError(Exception):
    """The server is a standby."""


class ReadOnlyError(Exception):
    """The server is not a standby, and refuses writes in this session."""


class NoTlsError(Exception):
    """The server, or a proxy before it, answered the wish for TLS with something else."""


class UnreadableRowError(Exception):
    """A function of the schema returned a row that no function of this version returns. The outcome is unknown."""


_GRANTS = "the role lacks a permission: USAGE on the schema, or SELECT, INSERT, UPDATE and DELETE on its tables"
_ENCODING = "a name or a label has a character that the database cannot store; its encoding should be UTF8"
_NOT_OURS = "the schema has tables or functions that are not those of this version; set another schema"
_READ_ONLY: Verdict = (
    BackendUnavailableError,
    "the server takes no writes, because default_transaction_read_only is on for the server, database, role or session",
)

CODES: dict[str, Verdict] = {
    # Another try may help.
    "25006": _READ_ONLY,
    "40001": (BackendUnavailableError, "the transaction was rolled back again and again"),
    "40P01": (BackendUnavailableError, "the transaction was rolled back again and again"),
    "53300": (BackendUnavailableError, "the server, the database or the role has no connection left"),
    "53100": (BackendUnavailableError, "the server's disk is full"),
    "53200": (BackendUnavailableError, "the server has no memory left"),
    "55P03": (BackendUnavailableError, "another transaction keeps the row of the lock, or of its fence, locked"),
    "57014": (BackendUnavailableError, "the statement was cancelled; is statement_timeout very short?"),
    "57P01": (BackendUnavailableError, "the connection was ended by an operator or a shutdown"),
    "57P02": (BackendUnavailableError, "the server crashed"),
    "57P03": (BackendUnavailableError, "the server is starting or shutting down"),
    # Another try cannot help.
    "28000": (BackendRefusedError, "the server rejects this role; see its pg_hba.conf"),
    "28P01": (BackendRefusedError, "wrong user or password"),
    "3D000": (BackendRefusedError, "the database does not exist"),
    "42501": (BackendRefusedError, _GRANTS),
    "42704": (BackendRefusedError, "the URL has an option that neither libpq nor the server knows"),
    "22023": (BackendRefusedError, "the URL has an option with a value that the server does not take"),
    "22021": (BackendRefusedError, _ENCODING),
    "22P05": (BackendRefusedError, _ENCODING),
    "22003": (BackendRefusedError, "a number of the claim cannot be stored"),
    "22008": (BackendRefusedError, "a number of the claim cannot be stored"),
    "54000": (BackendRefusedError, "the name cannot be stored"),
    "42883": (BackendRefusedError, _NOT_OURS),
    "42P01": (BackendRefusedError, _NOT_OURS),
    "42703": (BackendRefusedError, _NOT_OURS),
    "42804": (BackendRefusedError, _NOT_OURS),
    "42809": (BackendRefusedError, _NOT_OURS),
    "3F000": (BackendRefusedError, _NOT_OURS),
    "42939": (BackendRefusedError, "the schema has a name that PostgreSQL keeps for itself; set another one"),
    "42601": (
        BackendRefusedError,
        "the server does not know a statement of the schema; it must be PostgreSQL 12 or newer",
    ),
    "23514": (BackendRefusedError, "the next token would not fit into 53 bits; is the server's clock right?"),
}

CLASSES: tuple[tuple[type[BaseException], Verdict], ...] = (
    (StandbyError, (BackendUnavailableError, "a standby takes no writes; name the primary in the URL, or promote it")),
    (ReadOnlyError, _READ_ONLY),
    (UnreadableRowError, (BackendUnavailableError, _NOT_OURS)),
    (ConnectionAbandonedError, (BackendUnavailableError, "the connection was abandoned, or the backend was closed")),
    (
        NoTlsError,
        (BackendRefusedError, "it, or a proxy before it, has no TLS, which sslmode requires; set ssl = on there"),
    ),
    (driver.TargetNotMatched, (BackendUnavailableError, "no host matches target_session_attrs")),
    (driver.Disconnected, (BackendUnavailableError, "the connection broke")),
    (TimeoutError, (BackendUnavailableError, "the server did not answer while a connection was opened")),
    (asyncio.IncompleteReadError, (BackendUnavailableError, "the connection broke")),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)

_UNKNOWN: Verdict = (BackendUnavailableError, "PostgreSQL failed")

POOLER = "08P01"
"""PgBouncer gives this one code for all that it says itself. So its text decides; it is read, and never repeated."""

_FULL: Verdict = (BackendUnavailableError, "the pooler, or the server behind it, has no connection left")
POOLER_TEXTS: tuple[tuple[str, Verdict], ...] = (
    ('database ".*" does not exist|no such database', CODES["3D000"]),
    (
        "server login|authentication failed for user|cannot connect to server|client_login_timeout",
        (BackendUnavailableError, "the pooler cannot connect or log in to the server behind it; its log says why"),
    ),
    ("authentication failed|no such user", CODES["28P01"]),
    ("login rejected", (BackendRefusedError, "the pooler rejects this user; see its auth_hba_file")),
    ("SSL required", (BackendRefusedError, "the pooler asks for TLS; write sslmode=require, or verify-full")),
    ("no more connections allowed|connections exceeded|query_wait_timeout", _FULL),
    ("unsupported startup parameter", (BackendRefusedError, "the pooler does not take an option of the URL")),
)
_POOLER: Verdict = (BackendUnavailableError, "a pooler before the server refuses; its log says why")


def _of_pooler(text: str) -> Verdict:
    return next((verdict for pattern, verdict in POOLER_TEXTS if re.search(pattern, text)), _POOLER)


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*. A SQLSTATE counts more than a class."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, NoConnectionError):
        return BackendUnavailableError(BACKEND, operation, str(error))
    code = driver.code_of(error)
    known = _of_pooler(str(error)) if code == POOLER else CODES.get(code)
    kind, hint = known or verdict_by_class(error, CLASSES, _UNKNOWN)
    return kind(BACKEND, operation, f"{hint} ({code or type(error).__name__})")


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
