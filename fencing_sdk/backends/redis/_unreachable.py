"""
What is said of a server that is not reached: where it was looked for, and why it is not there.

A host and a port are no secrets; what stands before them in a URL, and what a driver says, may be.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterable

from redis.exceptions import ConnectionError as RedisConnectionError

__all__ = ["UnreachableError", "reason_of"]

_MOST = 5
"""Servers that are named in one error."""


class UnreachableError(RedisConnectionError):
    """
    No server answers where one was looked for.

    Args:
        places: Where, each with the reason: ``"localhost:6379 (Connection refused)"``.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        more = f" and {len(places) - _MOST} more" if len(places) > _MOST else ""
        super().__init__(f"no connection to {', '.join(places[:_MOST])}{more}")

    @classmethod
    def at(cls, address: str, reason: str) -> UnreachableError:
        """Make the error for one server."""
        return cls(f"{address} ({reason})")

    @classmethod
    def of_all(cls, errors: Iterable[UnreachableError]) -> UnreachableError:
        """Make the error for several servers, of which one would have been enough."""
        return cls(*sorted({place for error in errors for place in error.places}))


def reason_of(error: BaseException | None) -> str:
    """Tell in the system's words why a connection was not opened, or was closed at once."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name cannot be resolved"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or type(error).__name__}"  # only OpenSSL sets it
    if isinstance(error, OSError):
        numbers = [error.errno] if error.errno else map(int, re.findall(r"\[Errno (\d+)\]", str(error)))
        if texts := dict.fromkeys(os.strerror(number) for number in numbers):  # several for a name of several addresses
            return " or ".join(texts)
    return "the connection was closed" if error is None else type(error).__name__
