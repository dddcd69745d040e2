"""The options of the backend, and what a URL says."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from fencing_sdk._rest.login import Credentials
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["OPTIONS", "check_connections", "credentials", "parts_of", "read_number"]

OPTIONS = ("prefix", "user", "password", "ca", "cert", "key", "ssl_context", "connect_timeout", "connections")
_MOST_CONNECTIONS = 1000


def check_connections(connections: object) -> int:
    if isinstance(connections, bool) or not isinstance(connections, int) or not 1 <= connections <= _MOST_CONNECTIONS:
        msg = f"connections must be a whole number from 1 to {_MOST_CONNECTIONS}, got {shown(connections)}"
        raise ConfigurationError(msg)
    return connections


def credentials(user: object, password: object) -> Credentials | None:
    """Who to log in as; None for nobody. A password is never repeated."""
    for name, text in (("user", user), ("password", password)):
        if text is not None and (not isinstance(text, str) or not text):
            msg = f"{name} must be a str that is not empty, or None"
            raise ConfigurationError(msg)
    if (user is None) != (password is None):
        given, missing = ("user", "password") if password is None else ("password", "user")
        msg = f"{given} is nothing without the other; pass {missing} too"
        raise ConfigurationError(msg)
    return None if user is None else Credentials(str(user), str(password))


def parts_of(url: str) -> tuple[Sequence[str], str | None, str | None, bool]:
    """The endpoints, user and password of a URL, and whether it is for TLS."""
    parts = urlsplit(url)
    if parts.path not in {"", "/"}:
        msg = "url has a path, which etcd does not have; write etcd://host:port,host:port and prefix= for a place in it"
        raise ConfigurationError(msg)
    login, at, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    if at and not (user and password and not {"@", ","} & set(login)):
        msg = "url must have user:password@ once, before all hosts; in a password, write %40 for @ and %2C for a comma"
        raise ConfigurationError(msg)
    return hosts.split(","), unquote(user) or None, unquote(password) or None, parts.scheme == "etcd+https"


def read_number(option: str, text: str, read: type[float | int]) -> float:
    """Read the number that a URL gives as text."""
    try:
        return read(text)
    except ValueError:
        pass
    msg = f"{option} must be a number, got {shown(text)}"
    raise ConfigurationError(msg)
