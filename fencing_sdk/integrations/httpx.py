"""
The holder's side for httpx and httpx2, sync and async, without importing either.

    client = httpx.AsyncClient(event_hooks={"request": [fencing_hook(origins=["https://seats.example"])]})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Protocol

from fencing_sdk.integrations._outgoing import Headers, Origin, Outgoing
from fencing_sdk.integrations._problem import may_be_stale, raise_if_stale

__all__ = ["fencing_hook", "raise_for_stale"]


class _Url(Protocol):
    @property
    def scheme(self) -> str: ...

    @property
    def raw_host(self) -> bytes: ...

    @property
    def raw_path(self) -> bytes: ...

    @property
    def port(self) -> int | None: ...


class HttpxRequest(Protocol):
    """The part of a request of httpx or httpx2 that is used here."""

    @property
    def url(self) -> _Url: ...

    @property
    def headers(self) -> Headers: ...


class HttpxResponse(Protocol):
    """The part of a response of httpx or httpx2 that is used here."""

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> bytes: ...

    @property
    def request(self) -> HttpxRequest: ...


class _Done:
    """Awaited by an AsyncClient, thrown away by a Client."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_DONE = _Done()


def fencing_hook(
    origins: Iterable[str], *, name: str | None = None, required: bool = False
) -> Callable[[HttpxRequest], Awaitable[None]]:
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

    def hook(request: HttpxRequest) -> Awaitable[None]:
        url = request.url
        outgoing.carry(Origin.of(url.scheme, url.raw_host.decode("ascii"), url.port), request.headers)
        return _DONE

    return hook


def raise_for_stale(response: HttpxResponse) -> None:
    """
    Raise `StaleTokenError` if *response*, whose body was read, is the refusal of a guarded service.

    Call it before ``raise_for_status()``. It trusts the server that answered: use it for your own services.

    Raises:
        StaleTokenError: the token of this request was refused. Never retry it.
    """
    if may_be_stale(response.status_code, response.headers.get("Content-Type", "")):
        request = response.request
        path = request.url.raw_path.partition(b"?")[0].decode("ascii")
        raise_if_stale(response.status_code, response.content, headers=request.headers, path=path)
