"""
FastAPI: the token of a request and the lease of a handler, as dependencies.

    app = FastAPI(lifespan=lifespan(locks))
    answer_problems(app)

    @app.put("/seats/{seat}")
    async def book(seat: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]): ...

Dependencies run in the order in which they are written, those of the application and the router
first. Put authentication before these: every request that gets here can raise a fence.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeAlias, Unpack

from fencing_sdk._values.drivers import imported_from

with imported_from("fastapi", "fastapi"):
    from fastapi import Depends, FastAPI, Header, Request, Response, WebSocket
    from fastapi.params import Depends as Dependency
    from fastapi.requests import HTTPConnection

from fencing_sdk._arguments import LockOptions
from fencing_sdk._client import LockClient
from fencing_sdk._lease import Lease
from fencing_sdk._values.observers import Observer
from fencing_sdk._values.token import HEADER, OLD_HEADER, Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.integrations._incoming import (
    Demand,
    ResourceTemplate,
    answer_to,
    check_guard,
    check_path,
    check_resource,
    presented,
)
from fencing_sdk.integrations._problem import (
    MAPPED,
    MEDIA_TYPE,
    check_stale_status,
    refusals,
)
from fencing_sdk.integrations.asgi import App, Message, Receive, Scope, Send, check_client, lifespan

__all__ = ["Fenced", "Leased", "Presented", "answer_problems", "lifespan"]

Naming: TypeAlias = str | Callable[..., str] | Callable[..., Awaitable[str]]
"""A template, filled in from the path, or a dependency of your own that returns the name."""

_ABOUT = "The fencing token of the caller's lease, such as `34`."
_Shown = Annotated[str | None, Header(alias=HEADER, description=_ABOUT)]
"""For OpenAPI: FastAPI would take the last of two headers, so the value is read from the raw ones."""


async def _read(request: HTTPConnection, fencing_token: _Shown = None) -> Token | None:  # noqa: ARG001  (shown, not read)
    return _presented(request)


_Carried = Annotated[Token | None, Depends(_read)]


def Fenced(  # noqa: N802  (like Depends)
    guard: Guard, *, resource: Naming, required: bool = True, observers: Sequence[Observer] = ()
) -> Dependency:
    """
    Depend on the token of the request, admitted by *guard*.

        token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]

    The fence is raised before the handler runs, and a pause in between is as long as any pause.
    Where the handler's write has to be part of the check, use `Presented` and admit in its
    transaction.

    Args:
        guard: Any guard.

        resource: ``"seats/{seat}"``, filled in from the text of the path, or a dependency that
            returns the name. Take the latter where one thing has two spellings (``42``, ``042``):
            two names are two fences.

        required: Whether a request without a token is refused. If not, the token may be None.

        observers: Callables that receive `TokenMissing` for every request without a token, refused or not.

    Raises:
        ConfigurationError: an argument cannot work. For the answers, see `answer_problems`.
    """
    check_guard(guard, resource)
    demand = Demand(observers, required=required)
    named = _naming(resource, "resource")

    async def fenced(token: _Carried, resource: str = Depends(named)) -> Token | None:
        resource = check_resource(resource)
        token = demand.check(token, resource)
        if token is not None:
            await guard.raise_to(resource, token)
        return token

    return Dependency(fenced)


def Presented(*, required: bool = True, observers: Sequence[Observer] = ()) -> Dependency:  # noqa: N802
    """
    Depend on the token that the request carries. It is well formed and not yet checked by a guard.

    Check it where the handler writes: ``await guard.admit(session, resource, token)``, first in
    the transaction. The `StaleTokenError` may leave the handler: `answer_problems` answers it. *observers* receive
    `TokenMissing`, as those of `Fenced`.

    Raises:
        ConfigurationError: *required* is not a bool, or *observers* are not observers.
    """
    demand = Demand(observers, required=required)

    async def presented_token(token: _Carried) -> Token | None:
        return demand.check(token, None)

    return Dependency(presented_token)


def Leased(locks: LockClient, name: Naming, **options: Unpack[LockOptions]) -> Dependency:  # noqa: N802
    """
    Depend on a lock that is held while the handler runs.

        lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]

    It is released before the answer is sent, so a lease that was lost answers 503 even when the
    handler did not notice; what a streaming response sends later is sent without the lock. An
    ``async def`` handler is cancelled when the lease is lost. A plain ``def`` handler runs in a
    thread, which cannot be cancelled: let it call ``lease.check()``, and send the token.

    Args:
        locks: An open client; see `lifespan`.

        name: The name of the lock: a template filled in from the path, or a dependency.

        **options: As for `LockClient.lock`. Give ``wait``: without it a request waits for ever.

    Raises:
        ConfigurationError: an argument cannot work. For the answers, see `answer_problems`.
    """
    check_client(locks)
    locks.lock("checked-when-declared", **options)
    named = _naming(name, "name")

    async def leased(name: str = Depends(named)) -> AsyncIterator[Lease]:
        async with locks.lock(check_resource(name), **options) as lease:
            yield lease

    return Dependency(leased, scope="function")


def answer_problems(app: FastAPI, *, stale_status: int = 409) -> None:
    """
    Answer the errors of ours that leave a handler or a dependency of *app* with problem+json, and show it in OpenAPI.

    A websocket gets such an answer until it was accepted, and later the error stays an error.
    ``StaleTokenError`` is 409 (or 412), if it is about the token of this very request; a missing
    token 428, a malformed one 400, and so is ``InvalidNameError``, which a guard or a lock raises
    when the request makes no name that it takes; a lock that was not acquired 423, a lost lease
    503, both with Retry-After. A ``BackendError`` is logged, and is 503 too: with Retry-After if the
    store did not answer, without if it refused. Call it once, before the application starts, and once for each
    application that is mounted in *app*: that one answers the errors of its handlers itself.

    Raises:
        ConfigurationError: *stale_status* is neither 409 nor 412.
    """
    check_stale_status(stale_status)

    async def answer(request: Request | WebSocket, error: Exception) -> Response:
        scope = request.scope
        if scope["type"] == "websocket":
            may_answer = _ANSWERED not in scope and "websocket.http.response" in scope.get("extensions", {})
        else:
            may_answer = True  # Starlette notes by itself when the response has begun
        problem = answer_to(error, lambda: _presented(request), stale_status) if may_answer else None
        if problem is None:
            raise error
        return Response(problem.body, problem.status, problem.headers)

    for kind in MAPPED:
        app.add_exception_handler(kind, answer)
    app.add_middleware(_NoteAnswers)
    _show_in_openapi(app, stale_status)


class _NoteAnswers:
    """Notes in the scope of a websocket that it got its answer: Starlette would send it ours as a second one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            scope[_ANSWERED] = True
            await send(message)

        await self._app(scope, receive, noting if scope["type"] == "websocket" else send)


_ANSWERED = "fencing_sdk.answered"


def _naming(name: object, parameter: str) -> Callable[..., object]:
    if callable(name):
        return name
    if not isinstance(name, str):
        msg = f"{parameter} must be a template such as 'seats/{{seat}}' or a dependency, not {shown(name)}"
        raise ConfigurationError(msg)
    template = ResourceTemplate(name, parameter=parameter)

    async def by_path(request: HTTPConnection) -> str:
        scope, route = request.scope, str(getattr(request.scope.get("route"), "path", ""))
        check_path(scope["path"], scope.get("raw_path"), slashed=route.endswith("/"))
        return template.fill(request.path_params)

    return by_path


def _presented(request: HTTPConnection) -> Token | None:
    return presented(request.headers.getlist(HEADER), request.headers.getlist(OLD_HEADER))


def _show_in_openapi(app: FastAPI, stale_status: int) -> None:
    """Add our answers to every operation that takes the header: dependencies cannot declare them."""
    plain = app.openapi
    kinds = {"type": "string", "title": "string", "status": "integer", "detail": "string"}
    members = {name: {"type": kind} for name, kind in kinds.items()}
    content = {MEDIA_TYPE: {"schema": {"type": "object", "properties": members}}}

    def openapi() -> dict[str, Any]:
        schema = plain()
        for path in schema.get("paths", {}).values():
            for operation in path.values():
                parameters = operation.get("parameters", ()) if isinstance(operation, dict) else ()
                if any((one.get("in"), one.get("name")) == ("header", HEADER) for one in parameters):
                    for status, text in refusals(stale_status).items():
                        operation["responses"].setdefault(str(status), {"description": text, "content": content})
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation extends it
