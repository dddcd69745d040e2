"""
The resource's side for every WSGI framework, without importing one.

    app = GuardedApplication(app, guard, resource="seats/{seat}", locks=locks)      # app.wsgi_app of Flask
    app = GuardedApplication(app)                                                    # the handler admits the token

The check is over before the handler runs. Where the handler's write has to be part of the check, leave the guard out
and admit the token of the request in its transaction, with ``admit_sync``.

WSGI and Django hand over the headers as variables such as ``HTTP_FENCING_TOKEN``, in which a header that came twice is
a list, and a server may read a name with an underscore as one with a hyphen. A list is refused here. The name is up to
the server: gunicorn and waitress drop such headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from itertools import chain, islice
from typing import Any, Literal, TypeAlias, TypeVar, Unpack, overload

from fencing_sdk._values.observers import logger
from fencing_sdk._values.token import ACCEPTED_HEADERS, Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.integrations._incoming import Checkpoint, GuardOptions, demanded, presented, problem_of
from fencing_sdk.integrations._problem import MAPPED
from fencing_sdk.sync import LockClient

__all__ = ["GuardedApplication", "problem_of", "request_token"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
WsgiApp: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

R = TypeVar("R")

_NAME, _OLD_NAME = ("HTTP_" + name.upper().replace("-", "_") for name in ACCEPTED_HEADERS)


class GuardedApplication:
    """
    Refuses stale requests before the application runs, and answers the errors of ours that leave it.

    The answers, and what is not promised, are those of `fencing_sdk.integrations.asgi.FencingMiddleware`: put
    authentication in front of this one, too. A framework that turns the errors of a handler into a 500 itself, such as
    Flask, needs an error handler that answers by `problem_of`.

    Args:
        app: The application.

        guard: Any guard. None leaves the check to the handler.

        resource: The resource of a request: ``"seats/{seat}"``, filled in from the path, or a callable of the
            environ that returns it, or None for a request that needs no token.

        locks: A client of ``fencing_sdk.sync``, whose thread asks the guard. Needed with a guard.

        **options: ``path``, ``methods``, ``required``, ``stale_status`` and ``observers``, as for `FencingMiddleware`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        app: WsgiApp,
        guard: Guard | None = None,
        *,
        resource: str | Callable[[Environ], str | None] | None = None,
        locks: LockClient | None = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        self.app = app
        self._checkpoint = BlockingCheckpoint(guard, resource, _target, token_of, locks, **options)

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
            problem = None if begun else self._checkpoint.answer_to(error, environ)
            if problem is None:
                raise
            headers = {**problem.headers, "Content-Length": str(len(problem.body))}
            start_response(f"{problem.status} {HTTPStatus(problem.status).phrase}", list(headers.items()))
            return [problem.body]


class _Begun:
    """
    The chunks of an application that does its work when the server asks for the first one, such as a generator.

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


@overload
def request_token(environ: Environ, *, required: Literal[True] = True) -> Token: ...
@overload
def request_token(environ: Environ, *, required: Literal[False]) -> Token | None: ...
def request_token(environ: Environ, *, required: bool = True) -> Token | None:
    """
    Return the token that a request carries: the one that `GuardedApplication` has looked at.

    Where it is not *required*, a request without a token gives None.

    Raises:
        FencingError: the token is missing or malformed. `GuardedApplication` answers 428 or 400.
    """
    return demanded(token_of(environ), required=required)


# What Django needs, too


class BlockingCheckpoint(Checkpoint[R]):
    """
    The check of a middleware in a request of type *R*, in the thread that serves it.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    __slots__ = ("_locks",)

    def __init__(
        self,
        guard: Guard | None,
        resource: str | Callable[[R], str | None] | None,
        target_of: Callable[[R], tuple[str, bytes | None]],
        read: Callable[[R], Token | None],
        locks: LockClient | None,
        **options: Unpack[GuardOptions],
    ) -> None:
        super().__init__(guard, resource, lambda route: route.by(target_of), read, **options)
        given: object = locks
        if not isinstance(given, LockClient) and not (given is None and guard is None):
            msg = f"locks must be a client of fencing_sdk.sync, whose thread asks the guard, not {shown(given)}"
            raise ConfigurationError(msg)
        self._locks = locks

    def admit(self, request: R, method: str) -> None:
        """
        Refuse a request that comes too late.

        Raises:
            FencingError: as `Checkpoint.question` and the guard.
        """
        question = self.question(request, method)
        if question is not None and self.guard is not None and self._locks is not None:
            self._locks.run(self.guard.raise_to, *question)


def token_of(variables: Mapping[str, Any]) -> Token | None:
    """
    Return the one token in the *variables* of a request, or None.

    Raises:
        RequestRefused: it is malformed, or came twice.
    """
    found = [[variables[name]] if name in variables else [] for name in (_NAME, _OLD_NAME)]
    return presented(*found)


def sent_target(variables: Mapping[str, Any]) -> bytes | None:
    """Return the target of a request as it was sent, from one of two variables that are not part of WSGI, or None."""
    target = variables.get("REQUEST_URI") or variables.get("RAW_URI")
    return target.encode("latin-1", "replace") if isinstance(target, str) else None


def _target(environ: Environ) -> tuple[str, bytes | None]:
    """The path below the application, whose bytes WSGI hands over as Latin-1, and the target as it was sent."""
    raw: str = environ.get("PATH_INFO", "")
    return raw.encode("latin-1").decode("utf-8", "replace"), sent_target(environ)
