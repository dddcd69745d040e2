"""
Holder's side: which token goes with a request, and to which server.

A token goes to the listed origins only, also after a redirect: a foreign server that learns a token
can raise the fence of every resource that accepts tokens from it. So every outgoing request is
checked, and each hop of a redirect is a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import NamedTuple, Protocol

from fencing_sdk._arguments import check_flag
from fencing_sdk._lease import current_token
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.token import ACCEPTED_HEADERS, HEADER, OLD_HEADER, format_token
from fencing_sdk.errors import ConfigurationError, NoLeaseError, shown

_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT_LIMIT = 65_535
_ORIGIN = re.compile(r"(https?)://(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?/?", re.ASCII)


class Headers(Protocol):
    """The part of a client library's headers that is used here; names are compared without case."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> str: ...

    def __setitem__(self, name: str, value: str, /) -> None: ...

    def __delitem__(self, name: str, /) -> None: ...


class Origin(NamedTuple):
    """Scheme, host and port: what a browser calls the same origin."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, scheme: str, host: str, port: int | None) -> Origin:
        """The origin of a URL that a client library has taken apart; a missing *port* is the scheme's own."""
        return cls(scheme, host.lower(), _DEFAULT_PORTS.get(scheme, 0) if port is None else port)

    @classmethod
    def parse(cls, text: object) -> Origin:
        """
        Read ``"https://seats.example"`` or ``"http://[::1]:8080"``.

        Raises:
            ConfigurationError: *text* is not such an origin, or more than one.
        """
        match = _ORIGIN.fullmatch(text.lower()) if isinstance(text, str) and text.isascii() else None
        if match is None:
            seen = "one with a user" if isinstance(text, str) and "@" in text else shown(text)  # or with a password
            msg = (
                f"origins must be like 'https://seats.example' or 'http://127.0.0.1:8080', got {seen}; "
                "no path, user, pattern or other scheme, and a foreign host name in its ASCII form (xn--...)"
            )
            raise ConfigurationError(msg)
        scheme, literal, host, digits = match.groups()
        port = int(digits) if digits else _DEFAULT_PORTS[scheme]
        if not 0 < port <= _PORT_LIMIT:
            msg = f"origins: the port of {shown(text)} must be from 1 to {_PORT_LIMIT}"
            raise ConfigurationError(msg)
        try:
            return cls(scheme, IPv6Address(literal).compressed if literal else host, port)
        except ValueError as error:
            msg = f"origins: {shown(literal)} is not an IPv6 address"
            raise ConfigurationError(msg) from error


class Outgoing:
    """
    What a client adds to its requests.

    Raises:
        ConfigurationError: an origin is malformed, the list is empty, or *name* is not a name.
    """

    __slots__ = ("_name", "_origins", "_required")

    def __init__(self, origins: Iterable[str], *, name: str | None, required: bool) -> None:
        self._origins = _check_origins(origins)
        self._name = None if name is None else check_name(name)
        self._required = check_flag(required, "required")

    def allows(self, origin: tuple[str, str, int]) -> bool:
        """Return whether tokens may go to *origin*: an `Origin`, or its three parts in lower case."""
        return origin in self._origins

    def carry(self, origin: tuple[str, str, int], headers: Headers) -> None:
        """
        Put the token of the current lease into the *headers* of a request to *origin*, or keep it out.

        Raises:
            LeaseLostError: the lease is over; do not send.
            NoLeaseError: there is no lease, and one is required.
        """
        there = HEADER in headers or OLD_HEADER in headers  # by the caller, or by us on an earlier hop
        if origin not in self._origins:
            for name in ACCEPTED_HEADERS if there else ():
                if name in headers:
                    del headers[name]
            return
        try:
            token = current_token(self._name)
        except NoLeaseError:
            if self._required and not there:
                raise
            return
        if not there:
            headers[HEADER] = format_token(token)


def _check_origins(origins: object) -> frozenset[Origin]:
    if isinstance(origins, (str, bytes)) or not isinstance(origins, Iterable):
        msg = f"origins must be a list such as ['https://seats.example'], got {shown(origins)}"
        raise ConfigurationError(msg)
    found = frozenset(Origin.parse(text) for text in origins)
    if not found:
        msg = "origins must name at least one origin; a token is sent to no other origin"
        raise ConfigurationError(msg)
    return found
