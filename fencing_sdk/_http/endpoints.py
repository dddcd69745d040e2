"""Where the nodes of a cluster are, and which of them is asked first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from yarl import URL

from fencing_sdk.errors import ConfigurationError

__all__ = ["Endpoint", "EndpointRules", "Endpoints", "read_endpoints"]

_HIGHEST_PORT = 65535
_ENDPOINT = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?)(?::(?P<port>[0-9]{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class EndpointRules:
    """What is the same for all nodes of one kind of store."""

    example: str
    """A URL of the store, for messages."""
    plain_port: int
    tls_port: int
    paths: tuple[str, ...]
    user_hint: str
    """What to write instead of an endpoint with a user or a password, for messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One node, with a URL for each path."""

    origin: str
    urls: dict[str, URL] = field(repr=False)


class Endpoints:
    """
    All nodes, in the order in which they are asked.

    Any node may be asked, because a node that is not the leader passes the request on. A node that answers
    stays first. A node that failed goes to the end: it is asked again when all others fail.
    """

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._order = list(endpoints)

    def in_turn(self) -> Sequence[Endpoint]:
        """The nodes in their present order."""
        return tuple(self._order)

    def mark_failed(self, endpoint: Endpoint) -> None:
        """From now on, ask all other nodes before *endpoint*."""
        self._order.remove(endpoint)
        self._order.append(endpoint)


def read_endpoints(texts: object, rules: EndpointRules, *, tls: bool) -> Endpoints:
    """
    Read the address of each node: ``host``, ``host:port`` or ``[address]:port``.

    Raises:
        ConfigurationError: there is no address, or one cannot be read. The message does not repeat it,
            because it may hold a password.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        host = rules.example.partition("://")[2]
        msg = f"endpoints must be a sequence of 'host:port', such as ['{host}']"
        raise ConfigurationError(msg)
    read = dict.fromkeys(_read(text, number, rules, tls=tls) for number, text in enumerate(texts, 1))
    if not read:
        msg = f"endpoints must name at least one node, such as {rules.example}"
        raise ConfigurationError(msg)
    return Endpoints(_endpoint(origin, rules) for origin in read)


def _read(text: object, number: int, rules: EndpointRules, *, tls: bool) -> str:
    match = _ENDPOINT.fullmatch(text) if isinstance(text, str) else None
    port = int((match and match["port"]) or (rules.tls_port if tls else rules.plain_port))
    if match is None or not 0 < port <= _HIGHEST_PORT:
        if isinstance(text, str) and "@" in text:
            msg = f"endpoint {number} has a user or password, {rules.user_hint}"
            raise ConfigurationError(msg)
        msg = f"endpoint {number} must be host:port, with a port from 1 to {_HIGHEST_PORT} or none"
        raise ConfigurationError(msg)
    return f"{'https' if tls else 'http'}://{match['host'].lower()}:{port}"


def _endpoint(origin: str, rules: EndpointRules) -> Endpoint:
    try:
        urls = {path: URL(origin + path) for path in rules.paths}
    except ValueError:
        msg = "an endpoint has a host that cannot be read; write a name, an IPv4 address or an [IPv6 address]"
        raise ConfigurationError(msg) from None
    return Endpoint(origin, urls)
