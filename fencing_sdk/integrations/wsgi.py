"""
The resource's side for every WSGI framework, without importing one.

    app = GuardedApplication(app, guard, resource="seats/{seat}", locks=locks)      # app.wsgi_app of Flask
    app = GuardedApplication(app)                                                    # the handler admits the token

The check is over before the handler runs. Where the handler's write has to be part of the check, leave the guard out
and admit the token of the request in its transaction, with ``admit_sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from itertools import chain, islice
from typing import Any, TypeAlias

from fencing_sdk._values.claim import Token
from fencing_sdk._values.observers import logger
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, FencingError, shown
from fencing_sdk.integrations._blocking import BlockingCheckpoint, sent_target, token_of
from fencing_sdk.integrations._incoming import WRITES
from fencing_sdk.integrations._problem import MAPPED, Problem, check_stale_status, problem_of
from fencing_sdk.sync import SyncLockClient

__all__ = ["GuardedApplication", "problem_response", "request_token"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
WsgiApp: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class GuardedApplication:
    """
    Refuses stale requests before the application runs, and answers the errors of ours that leave it.

    The answers are those of `fencing_sdk.integrations.asgi.FencingMiddleware`: 409 for a stale token, 428 for none, 400
    for what is no token. A framework that turns the errors of a handler into a 500 itself, such as Flask, is told
    by ``app.register_error_handler(StaleTokenError, problem_response)``.

    Every request that gets here can raise the fence, so put authentication in front of it. Not promised: that the
    token is still the highest when the handler writes.

    Args:
        app: The application.

        guard: Any guard. None leaves the check to the handler.

        resource: The resource of a request: ``"seats/{seat}"``, filled in from the path, or a callable of the
            environ that returns it, or None for a request that needs no token.

        path: Where such requests go, when that is not ``"/" + resource``. Paths below it belong to the resource, too.

        locks: A client of ``fencing_sdk.sync``, in whose thread the guard is asked. Needed with a guard.

        methods: The methods that write.

        required: Whether a request without a token is refused.

        stale_status: 409, or 412.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        app: WsgiApp,
        guard: Guard | None = None,
        *,
        resource: str | Callable[[Environ], str | None] | None = None,
        path: str | None = None,
        locks: SyncLockClient | None = None,
        methods: Iterable[str] = WRITES,
        required: bool = True,
        stale_status: int = 409,
    ) -> None:
        self.app = app
        self._checkpoint = BlockingCheckpoint(
            guard,
            resource,
            request_token,
            lambda environ: (_path(environ), sent_target(environ)),
            path=path,
            locks=locks,
            methods=methods,
            required=required,
            stale_status=stale_status,
        )

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Judge the request, and pass it on."""
        begun = False

        def watched(*head: Any, **options: Any) -> Any:
            nonlocal begun
            begun = True
            return start_response(*head, **options)

        try:
            self._checkpoint.admit(environ, environ["REQUEST_METHOD"])
            chunks = self.app(environ, watched)
            return chunks if begun else _Begun(chunks)
        except MAPPED as error:
            if begun or not self._checkpoint.blames(error, environ):
                raise
            return _answer(problem_of(error, stale_status=self._checkpoint.stale_status))(environ, start_response)


class _Begun:
    """
    The chunks of an application that does its work when the first one is asked for, such as a generator.

    Asks for the first one at once, so that errors of the work are seen, and for no more: an answer may be a stream.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._whole = chunks
        try:
            rest = iter(chunks)
            self._chunks = chain(list(islice(rest, 1)), rest)
        except BaseException:
            try:
                self.close()  # the server never gets it
            except Exception:  # noqa: BLE001  (it must not take the place of the first error)
                logger.exception("an application failed, and so did the close() of its answer")
            raise

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Close the application's iterable, as the server would."""
        close = getattr(self._whole, "close", None)
        if close is not None:
            close()


def request_token(environ: Environ) -> Token | None:
    """
    The token that a request carries, or None: what `GuardedApplication` has looked at.

    Raises:
        FencingError: it is malformed. `GuardedApplication` answers that error, too.
    """
    return token_of(environ)


def problem_response(error: FencingError, *, stale_status: int = 409) -> WsgiApp:
    """
    Return the answer to an *error* that left a handler, as a WSGI application. An error handler of Flask may return it.

    Raises:
        ConfigurationError: *error* has no answer, or *stale_status* is neither 409 nor 412.
    """
    if not isinstance(error, MAPPED):
        msg = f"error must be one that has an answer, such as StaleTokenError, not {shown(error)}"
        raise ConfigurationError(msg)
    return _answer(problem_of(error, stale_status=check_stale_status(stale_status)))


def _answer(problem: Problem) -> WsgiApp:
    def respond(_environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = {**problem.headers, "Content-Length": str(len(problem.body))}
        start_response(f"{problem.status} {HTTPStatus(problem.status).phrase}", list(headers.items()))
        return [problem.body]

    return respond


def _path(environ: Environ) -> str:
    """The path below the application, whose bytes WSGI hands over as Latin-1."""
    raw: str = environ.get("PATH_INFO", "")
    return raw.encode("latin-1").decode("utf-8", "replace")
