"""
From the errors of a driver to the two errors of the contract, around every call of a backend.

`BackendRefusedError` is for errors that are permanent *and* certainly took no lock, because the engine then stops
without a release. Every other error, known or not, is a `BackendUnavailableError`: the outcome of the call is unknown
until the store answers another one. A store's table decides it by class and by code. The text of a driver's own error
may hold a URL or a statement, so it is never repeated. An error that the server sent is shown where no hint helps more.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, cast

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Guard
from fencing_sdk.abc._powers import TransactionalGuard
from fencing_sdk.errors import BackendError, BackendRefusedError, FencingError, shown

__all__ = [
    "FENCE_PATIENCE",
    "ErrorTranslation",
    "Fences",
    "NoConnectionError",
    "Verdict",
    "blaming_the_guard",
    "fence_refused",
    "no_connection_to",
    "one_line",
    "raise_fences",
    "reason_of",
    "verdict_by_class",
]

_MOST = 5
"""Servers that one error names."""
_LONGEST = 300
"""Characters that one error repeats of what a server said."""

Verdict = tuple[type[BackendError], str]
"""The class of the contract's error, and what its text says."""


def verdict_by_class(
    error: BaseException, verdicts: Iterable[tuple[type[BaseException], Verdict]], default: Verdict
) -> Verdict:
    """The first of *verdicts* whose class *error* has: put the most specific classes first."""
    return next((verdict for kind, verdict in verdicts if isinstance(error, kind)), default)


def one_line(text: object = "") -> str:
    """Return what a server said for the text of an error."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())[:_LONGEST]


def no_connection_to(servers: Sequence[str]) -> str:
    """Return which *servers* are unreachable. A host and a port are not secret; a login before them may be."""
    more = f" and {len(servers) - _MOST} more" if len(servers) > _MOST else ""
    return f"no connection to {', '.join(servers[:_MOST]) or 'a server'}{more}"


class NoConnectionError(Exception):
    """
    None of the servers takes a connection.

    Args:
        servers: Each address with its reason: ``"localhost:6379 (Connection refused)"``.

        reason: One reason for all of them.
    """

    def __init__(self, *servers: str, reason: str = "") -> None:
        self.servers = servers
        super().__init__(no_connection_to(servers) + (f" ({reason})" if reason else ""))

    @classmethod
    def at(cls, address: str, reason: str) -> Self:
        """Make the error for one server."""
        return cls(f"{address} ({reason})")

    @classmethod
    def of_all(cls, errors: Iterable[NoConnectionError]) -> Self:
        """Make the error for several servers, of which one would have been enough."""
        return cls(*sorted({server for error in errors for server in error.servers}))


_NO_TLS = "WRONG_VERSION_NUMBER"
"""OpenSSL's reason where the server answers without TLS."""


def reason_of(error: BaseException | None) -> str:
    """Return in the system's words why a connection did not open, or closed at once."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name cannot be resolved"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or type(error).__name__  # only OpenSSL sets a reason
        return f"TLS failed: {reason}" + (", the server answers without TLS" if reason == _NO_TLS else "")
    if isinstance(error, OSError):
        numbers = [error.errno] if error.errno else map(int, re.findall(r"\[Errno (\d+)\]", str(error)))
        if texts := dict.fromkeys(os.strerror(number) for number in numbers):  # one for each address of the name
            return " or ".join(texts)
    return "the connection was closed" if error is None else type(error).__name__


class ErrorTranslation:
    """
    ``with ErrorTranslation(translated, "acquire")``: the errors of a driver leave as errors of the contract.

    The package's own errors pass. This is a class because a generator would cost five times as much.
    """

    __slots__ = ("_operation", "_translated")

    def __init__(self, translated: Callable[[str, Exception], BackendError], operation: str) -> None:
        self._translated = translated
        self._operation = operation

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FencingError):
            raise self._translated(self._operation, error) from error


Fences = Sequence[tuple[Guard, str]]
"""Each guard, and the resource whose fence it raises."""
FENCE_PATIENCE = 1.0
"""Seconds to wait for a transaction that holds a fence. Then other acquisitions have their turn before the next try."""
_NOTE = "fencing_sdk: "
"""How a guard's own note on a driver's error begins. The message of the server is never repeated."""


async def raise_fences(
    transaction: object,
    claim: Claim,
    fences: Fences,
    token: int,
    *,
    backend: str,
    code_of: Callable[[Exception], object],
    missing: Collection[object],
) -> None:
    """
    Raise *fences* to the *token* that was granted to *claim*, in the *transaction* of the grant.

    The grant has found the tables of the locks, so a *missing* code (a schema, table or column that is missing, has
    another type, or is not permitted) is about the guard's.

    Raises:
        StaleTokenError: a fence is higher already.
        BackendRefusedError: a guard lacks its table, its schema or a permission.
        Exception: any other error of the driver or the guard.
    """
    for guard, resource in fences:
        with blaming_the_guard(resource, backend=backend, code_of=code_of, missing=missing):
            raised = Token(token, claim.holder)
            await cast("TransactionalGuard", guard).raise_in(transaction, resource, raised, wait=FENCE_PATIENCE)


@contextmanager
def blaming_the_guard(
    resource: str, *, backend: str, code_of: Callable[[Exception], object], missing: Collection[object]
) -> Iterator[None]:
    """
    Refuse an error with a *missing* code, as `raise_fences` does.

    Raises:
        BackendRefusedError: a guard lacks its table, its schema or a permission.
    """
    try:
        yield
    except Exception as error:
        code = code_of(error)
        if code not in missing:
            raise
        notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        why = "; ".join(notes) or "its table, its schema or a permission is missing"
        raise fence_refused(backend, resource, why, code) from error


def fence_refused(backend: str, resource: str, why: str, code: object) -> BackendRefusedError:
    """Make the error for a guard that lacks something, which *why* names."""
    return BackendRefusedError(
        backend, "acquire", f"the guard cannot raise the fence of {shown(resource)}: {why} ({code})"
    )
