"""
The holder's side for httpx, httpx2 and requests: which token goes with a request, and to which server.

    httpx.AsyncClient(event_hooks={"request": [fencing_hook(origins=["https://seats.example"])]})     # or a Client

    for scheme in ("https://", "http://"):
        session.mount(scheme, FencingAdapter(origins=["https://seats.example"]))                        # of requests

A token goes to the listed origins only, also after a redirect: a foreign server that learns a token
can raise the fence of every resource that accepts tokens from it. So every outgoing request is
checked, and each hop of a redirect is a request.

No client library is imported before an adapter is made.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from fencing_sdk._arguments import check_flag
from fencing_sdk._lease import current_token
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.drivers import imported_from
from fencing_sdk._values.token import ACCEPTED_HEADERS, HEADER, OLD_HEADER, format_token
from fencing_sdk.errors import ConfigurationError, NoLeaseError, shown
from fencing_sdk.integrations._problem import may_be_stale, raise_if_stale

if TYPE_CHECKING:
    from requests import PreparedRequest, Response
    from requests.adapters import BaseAdapter
else:
    BaseAdapter = object

__all__ = ["FencingAdapter", "fencing_hook", "raise_for_stale"]

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
    The token that a client adds to its requests.

    Raises:
        ConfigurationError: an origin is malformed, the list is empty, or *name* is not a name.
    """

    __slots__ = ("_name", "_origins", "_required")

    def __init__(self, origins: Iterable[str], *, name: str | None, required: bool) -> None:
        if isinstance(origins, (str, bytes)) or not isinstance(origins, Iterable):
            msg = f"origins must be a list such as ['https://seats.example'], got {shown(origins)}"
            raise ConfigurationError(msg)
        self._origins = frozenset(map(Origin.parse, origins))
        if not self._origins:
            msg = "origins must name at least one origin; a token is sent to no other origin"
            raise ConfigurationError(msg)
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


class _Done:
    """Awaited by an AsyncClient, thrown away by a Client."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_DONE = _Done()


def fencing_hook(
    origins: Iterable[str], *, name: str | None = None, required: bool = False
) -> Callable[[Any], Awaitable[None]]:
    """
    Make a request hook that sends the token of the current lease to *origins*, and to no other server.

    The client runs it for every hop of a redirect. A request to another origin loses the header,
    also one that you set yourself; to an origin of the list, a header that you set stays. A hook
    of a sync client sees the lease of the thread's context, as ``asyncio.to_thread`` passes it on.

    Args:
        origins: Scheme, host and port, such as ``"https://seats.example"``, compared exactly.

        name: Send the token of this lock, or of this permit or reader. By default, of the innermost lock.

        required: Whether a request outside of such a lease is an error.

    Raises:
        ConfigurationError: an argument cannot work. The hook itself raises `LeaseLostError` when
            the lease is over and `NoLeaseError` when there is none and one is required, and
            nothing is sent.
    """
    outgoing = Outgoing(origins, name=name, required=required)

    def hook(request: Any) -> Awaitable[None]:
        url = request.url
        outgoing.carry(Origin.of(url.scheme, url.raw_host.decode("ascii"), url.port), request.headers)
        return _DONE

    return hook


class FencingAdapter(BaseAdapter):
    """
    Sends the token of the current lease to *origins*, and to no other server. Mount it for ``https://`` and ``http://``.

    A session asks the adapter of the URL for every hop of a redirect. *origins*, *name* and *required*, what happens to
    a header that you set yourself, and what a request raises are as for `fencing_hook`.
    Where the adapter is not mounted, it takes nothing away: a header that you set goes along, and the token of the
    lease does not.

    Args:
        adapter: The adapter that sends. An ``HTTPAdapter`` by default.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        origins: Iterable[str],
        *,
        name: str | None = None,
        required: bool = False,
        adapter: BaseAdapter | None = None,
    ) -> None:
        self._outgoing = Outgoing(origins, name=name, required=required)
        if adapter is None:
            with imported_from(None, "requests"):
                from requests.adapters import HTTPAdapter  # noqa: PLC0415
            adapter = HTTPAdapter()
        self._adapter = adapter

    def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
        """Send *request*, with or without the token."""
        request = request.copy()  # a redirect copies the headers of the other one, and may go to another adapter
        url = urlsplit(request.url or "")
        self._outgoing.carry(Origin.of(str(url.scheme), str(url.hostname), url.port), cast("Headers", request.headers))
        return self._adapter.send(request, *args, **options)

    def close(self) -> None:
        """Close the adapter that sends."""
        self._adapter.close()


def raise_for_stale(response: Any) -> None:
    """
    Raise `StaleTokenError` if *response*, whose body was read, is the refusal of a guarded service.

    Call it before ``raise_for_status()``. It trusts the server that answered: use it for your own services.

    Raises:
        StaleTokenError: the token of this request was refused. Never retry it.
    """
    if may_be_stale(response.status_code, response.headers.get("Content-Type", "")):
        headers, path = response.request.headers, urlsplit(str(response.request.url)).path
        raise_if_stale(response.status_code, response.content, headers=headers, path=path)
