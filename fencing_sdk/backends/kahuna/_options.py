"""The options of the backend, read strictly: a typing error must not turn TLS off."""

from __future__ import annotations

import os
import ssl

from fencing_sdk.backends.kahuna._contract import DURABILITY
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["OPTIONS", "check_connections", "check_durability", "check_tls", "read_number"]

OPTIONS = ("durability", "ca", "ssl_context", "connect_timeout", "connections")
_MOST_CONNECTIONS = 1000


def check_durability(durability: object) -> str:
    """Return where grants are kept."""
    if isinstance(durability, str) and durability in DURABILITY:
        return durability
    msg = f"durability must be 'persistent' or 'ephemeral', got {shown(durability)}"
    raise ConfigurationError(msg)


def check_connections(connections: object) -> int:
    if isinstance(connections, bool) or not isinstance(connections, int) or not 1 <= connections <= _MOST_CONNECTIONS:
        msg = f"connections must be a whole number from 1 to {_MOST_CONNECTIONS}, got {shown(connections)}"
        raise ConfigurationError(msg)
    return connections


def check_tls(*, tls: object, ca: object, context: object) -> ssl.SSLContext | None:
    """Return how certificates are checked. There is no way to switch that off."""
    if not isinstance(tls, bool):
        msg = f"tls must be True or False, got {shown(tls)}"
        raise ConfigurationError(msg)
    if context is not None and not isinstance(context, ssl.SSLContext):
        msg = f"ssl_context must be an ssl.SSLContext, not {type(context).__name__}"
        raise ConfigurationError(msg)
    if not tls and not (ca is None and context is None):
        msg = "ca and ssl_context are for TLS; write kahuna+https://, or pass tls=True"
        raise ConfigurationError(msg)
    if ca is not None and context is not None:
        msg = "ca and ssl_context exclude each other; load the authority into the context"
        raise ConfigurationError(msg)
    if not tls or context is not None:
        return context
    return _context_of(ca)


def _context_of(ca: object) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    if not isinstance(ca, str | os.PathLike) or not os.fspath(ca):
        msg = f"ca must be the path of a PEM file, not {shown(ca)}"
        raise ConfigurationError(msg)
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = type(error).__name__
        msg = f"ca must be the path of a PEM file of certificates; {shown(os.fspath(ca))} cannot be read as one ({why})"
        raise ConfigurationError(msg) from error


def read_number(option: str, text: str, read: type[float | int]) -> float:
    """Read the number that a URL gives as text."""
    try:
        return read(text)
    except ValueError:
        pass
    msg = f"{option} must be a number, got {shown(text)}"
    raise ConfigurationError(msg)
