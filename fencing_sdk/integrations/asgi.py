"""
The resource's side for every ASGI framework, without importing one.

    app.add_middleware(FencingMiddleware, guard=guard, resource="seats/{seat}")     # Starlette, FastAPI
    app = FencingMiddleware(app, guard, resource="seats/{seat}")                    # any other

The check is over before the handler runs, and a pause in between is as long as any pause. Where
the handler's write has to be part of the check, leave the guard out and admit in its transaction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Literal, TypeAlias, Unpack, overload

from fencing_sdk._client import LockClient
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.integrations._incoming import Checkpoint, GuardOptions, Headers, demanded, problem_of, token_in
from fencing_sdk.integrations._problem import MAPPED, Problem

__all__ = ["FencingMiddleware", "Problem", "lifespan", "problem_of", "request_token"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class FencingMiddleware:
    """
    Refuses stale requests before the handler runs, and answers the errors of ours that leave it.

    The guard's fence is raised to the token of every request with one of *methods* whose path
    belongs to *resource*: 409 for a stale token, 428 for a missing one, 400 for a malformed one. Errors of
    the guard's database stay errors. Without a guard the token is read, and `request_token` hands it
    to the handler, which admits it where it writes; a `StaleTokenError` of that token is 409 all
    the same. An `InvalidNameError` of the handler is 400, a lock that was not acquired 423,
    `LeaseLostError` 503, all but the first with Retry-After. A `BackendError` is logged, and is 503
    too: with Retry-After if the store did not answer, without if it refused.

    A framework that answers the errors of its handlers itself, such as Litestar, Quart or Sanic, makes a 500 of them
    before they get here. Its own error handler answers them, by `problem_of`.

    Every request that gets here can raise the fence, so put authentication in front of it.
    Websockets pass unguarded: a connection outlives every check, so admit each message.

    Not promised: that the token is still the highest when the handler writes.

    Args:
        app: The application.

        guard: Any guard. None leaves the check to the handler.

        resource: The resource of a request: ``"seats/{seat}"``, filled in from the path, or a
            callable of the scope that returns it, or None for a request that needs no token.

        path: Where such requests go, when that is not ``"/" + resource``. Paths below it belong
            to the resource, too. A path that does not match passes unguarded.

        methods: The methods that write.

        required: Whether a request without a token is refused.

        stale_status: 409, or 412.

        observers: Callables that receive `TokenMissing` for every such request without a token, refused or not.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        app: App,
        guard: Guard | None = None,
        *,
        resource: str | Callable[[Scope], str | None] | None = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        self.app = app
        self._checkpoint = Checkpoint(
            guard, resource, lambda route: route.by(_target), _carried, whole="scope", **options
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Judge an HTTP request; pass anything else on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            question = self._checkpoint.question(scope, scope["method"])
            if question is not None and self._checkpoint.guard is not None:
                await self._checkpoint.guard.raise_to(*question)
            await self.app(scope, receive, watched)
        except MAPPED as error:
            problem = None if begun else self._checkpoint.answer_to(error, scope)
            if problem is None:
                raise
            await _answer(problem, send)


@overload
def request_token(scope: Scope | Headers, *, required: Literal[True] = True) -> Token: ...
@overload
def request_token(scope: Scope | Headers, *, required: Literal[False]) -> Token | None: ...
def request_token(scope: Scope | Headers, *, required: bool = True) -> Token | None:
    """
    Return the token that a request carries: the one that `FencingMiddleware` has looked at.

    Where it is not *required*, a request without a token gives None. In place of the scope, the headers of the request
    will do, as pairs: ``request_token(request.headers.items())`` in Sanic, whose own server has no scope.

    Raises:
        FencingError: the token is missing or malformed. `FencingMiddleware` answers 428 or 400.
    """
    return demanded(_carried(scope), required=required)


def _carried(scope: Scope | Headers) -> Token | None:
    return token_in(scope["headers"] if isinstance(scope, Mapping) else scope)


def lifespan(*clients: LockClient) -> Callable[[object], AbstractAsyncContextManager[None]]:
    """
    Keep lock clients open while the application runs: ``Starlette(lifespan=lifespan(locks))``.

    A client of ``connect(url, drain=25)`` lets bodies end for so many seconds when the application ends.

    For clients, not for locks: what a server does with the tasks of its lifespan is its own affair.

    Raises:
        ConfigurationError: one of *clients* is not a client.
    """
    for client in clients:
        check_client(client)

    @asynccontextmanager
    async def opened(_app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            yield

    return opened


def check_client(client: object) -> None:
    """Refuse everything but a client for tasks."""
    if not isinstance(client, LockClient):
        msg = f"a client of fencing_sdk.connect is needed here, got {shown(client)}"
        raise ConfigurationError(msg)


def _target(scope: Scope) -> tuple[str, bytes | None]:
    """The path as the routes of a mounted application see it, and as it was sent."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path, scope.get("raw_path")


async def _answer(problem: Problem, send: Send) -> None:
    headers = {**problem.headers, "Content-Length": str(len(problem.body))}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": problem.body})
