"""
Both sides for aiohttp: a client middleware that sends the token, a server middleware that guards.

    session = ClientSession(middlewares=[fencing_middleware(origins=["https://seats.example"])])
    app = web.Application(middlewares=[guard_middleware(guard, resource="seats/{seat}")])
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal, Unpack, overload

from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse, web
from aiohttp.typedefs import Handler, Middleware
from multidict import istr

from fencing_sdk._arguments import check_flag
from fencing_sdk._client import LockClient
from fencing_sdk._values.token import HEADER, OLD_HEADER, Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.integrations._incoming import Checkpoint, GuardOptions, RouteTemplate, check_path, demanded, presented
from fencing_sdk.integrations._problem import (
    BODY_LIMIT,
    MAPPED,
    STALE_STATUSES,
    SentHeaders,
    may_be_stale,
    raise_if_stale,
)
from fencing_sdk.integrations.asgi import lifespan
from fencing_sdk.integrations.clients import Outgoing

__all__ = ["cleanup_ctx", "fencing_middleware", "guard_middleware", "raise_for_stale", "request_token"]

_HEADER, _OLD_HEADER = istr(HEADER), istr(OLD_HEADER)

# The holder's side


def fencing_middleware(
    origins: Iterable[str], *, name: str | None = None, required: bool = False, raise_stale: bool = True
) -> ClientMiddlewareType:
    """
    Make a middleware that sends the token of the current lease to *origins*, and to no other server.

    It runs for every request and every hop of a redirect. *origins*, *name* and *required*, and what happens to a
    header that you set yourself, are those of `fencing_sdk.integrations.clients.fencing_hook`. ``middlewares=`` of a
    single request *replaces* those of the session: name this one there, too. With *raise_stale*, the refusal of a
    guarded service is raised as `StaleTokenError`. It is not a ClientError, so what retries those does not retry it.

    Raises:
        ConfigurationError: an argument cannot work. The request itself raises what the hook raises, and
            `StaleTokenError`.
    """
    outgoing = Outgoing(origins, name=name, required=required)
    check_flag(raise_stale, "raise_stale")

    async def fencing(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        url = request.url
        origin = (url.scheme, url.raw_host or "", url.port or 0)  # in lower case, with the default port
        outgoing.carry(origin, request.headers)
        response = await handler(request)
        if response.status in STALE_STATUSES and raise_stale and outgoing.allows(origin):
            await _raise_for_stale(response, request.headers, url.raw_path)
        return response

    return fencing


async def raise_for_stale(response: ClientResponse) -> None:
    """
    Raise `StaleTokenError` if *response* is the refusal of a guarded service; for sessions without the middleware.

    Call it before ``raise_for_status()``. It trusts the server that answered: use it for your own services.

    Raises:
        StaleTokenError: the token of this request was refused. Never retry it.
    """
    await _raise_for_stale(response, response.request_info.headers, response.request_info.url.raw_path)


async def _raise_for_stale(response: ClientResponse, headers: SentHeaders, path: str) -> None:
    may_be = may_be_stale(response.status, response.headers.get("Content-Type", ""))
    if may_be and (response.content_length or 0) <= BODY_LIMIT:
        raise_if_stale(response.status, await response.read(), headers=headers, path=path)


# The resource's side


def guard_middleware(
    guard: Guard | None = None,
    *,
    resource: str | Callable[[web.Request], str | None] | None = None,
    **options: Unpack[GuardOptions],
) -> Middleware:
    """
    Make a middleware that refuses stale requests, and answers the errors of ours that leave the handler.

    As `fencing_sdk.integrations.asgi.FencingMiddleware`, with two differences. *path* is compared
    with the route that was found, so it is written like that route, prefixes of sub-applications
    included, and a template that fits no route of the application is an error. A callable gets
    the request, with its ``match_info``.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    checkpoint = Checkpoint(guard, resource, _Routes, _carried, **options)

    @web.middleware
    async def guarding(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            question = checkpoint.question(request, request.method)
            if question is not None and guard is not None:
                await guard.raise_to(*question)
            return await handler(request)
        except MAPPED as error:
            problem = None if request.writer.output_size else checkpoint.answer_to(error, request)
            if problem is None:
                raise
            return web.Response(status=problem.status, body=problem.body, headers=problem.headers)

    return guarding


@overload
def request_token(request: web.Request, *, required: Literal[True] = True) -> Token: ...
@overload
def request_token(request: web.Request, *, required: Literal[False]) -> Token | None: ...
def request_token(request: web.Request, *, required: bool = True) -> Token | None:
    """
    Return the token that a request carries: the one that `guard_middleware` has looked at.

    Where it is not *required*, a request without a token gives None.

    Raises:
        FencingError: the token is missing or malformed. `guard_middleware` answers 428 or 400.
    """
    return demanded(_carried(request), required=required)


def _carried(request: web.Request) -> Token | None:
    headers = request.headers
    return presented(headers.getall(_HEADER, ()), headers.getall(_OLD_HEADER) if _OLD_HEADER in headers else ())


def cleanup_ctx(*clients: LockClient) -> Callable[[web.Application], AsyncIterator[None]]:
    """
    Keep lock clients open while the application runs: ``app.cleanup_ctx.append(cleanup_ctx(locks))``.

    For clients, not for locks: aiohttp may clean up in another task than it started in.

    Raises:
        ConfigurationError: one of *clients* is not a client.
    """
    held_open = lifespan(*clients)

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with held_open(app):
            yield

    return opened


class _Routes:
    """Names resources by the routes of the application, once it was seen that there are such routes."""

    __slots__ = ("_covered", "_seen", "_template")

    def __init__(self, template: RouteTemplate) -> None:
        self._template = template
        self._covered: set[web.AbstractResource] = set()
        self._seen: set[web.Application] = set()  # a middleware may stand in several

    def __call__(self, request: web.Request) -> str | None:
        match = request.match_info
        resource = match.route.resource
        if resource not in self._covered and request.app not in self._seen:
            self._look(request.app)
        if resource not in self._covered:
            return None
        assert resource is not None  # what is covered is a route of the application
        target = request.raw_path.encode("utf-8", "surrogateescape")
        check_path(request.path, target, slashed=resource.canonical.endswith("/"))
        return self._template.fill(match)

    def _look(self, app: web.Application) -> None:
        resources = {route.resource for route in app.router.routes()}
        found = {one for one in resources if one is not None and self._template.covers(one.canonical)}
        if not found:
            msg = f"{self._template} fits no route of the application, so nothing would be guarded; set path="
            raise ConfigurationError(msg)
        self._covered |= found
        self._seen.add(app)
