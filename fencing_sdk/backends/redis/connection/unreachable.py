"""
The error for a server that cannot be reached: its address, and the reason.

A host and a port are no secrets. The login before them in a URL may be one, and so may the text of a driver.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterable

from redis.exceptions import ConnectionError as RedisConnectionError

from fencing_sdk.backends._shared.error_translation import no_connection_to


class UnreachableError(RedisConnectionError):
    """
    No server answers at the given addresses.

    Args:
        servers: Each address with its reason: ``"localhost:6379 (Connection refused)"``.
    """

    def __init__(self, *servers: str) -> None:
        self.servers = servers
        super().__init__(no_connection_to(servers))

    @classmethod
    def at(cls, address: str, reason: str) -> UnreachableError:
        """Make the error for one server."""
        return cls(f"{address} ({reason})")

    @classmethod
    def of_all(cls, errors: Iterable[UnreachableError]) -> UnreachableError:
        """Make the error for several servers, of which one would have been enough."""
        return cls(*sorted({server for error in errors for server in error.servers}))


def reason_of(error: BaseException | None) -> str:
    """Say in the system's words why a connection did not open, or closed at once."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name cannot be resolved"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or type(error).__name__}"  # only OpenSSL sets a reason
    if isinstance(error, OSError):
        numbers = [error.errno] if error.errno else map(int, re.findall(r"\[Errno (\d+)\]", str(error)))
        if texts := dict.fromkeys(os.strerror(number) for number in numbers):  # one for each address of the name
            return " or ".join(texts)
    return "the connection was closed" if error is None else type(error).__name__
