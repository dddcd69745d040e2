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
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from fencing_sdk.errors import BackendError, FencingError

__all__ = [
    "ErrorTranslation",
    "NoConnectionError",
    "Verdict",
    "no_connection_to",
    "one_line",
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
