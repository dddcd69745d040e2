"""
Resource's side of servers that block: what WSGI and Django know of a request, and how a guard is asked from a thread.

Both hand over the headers as variables such as ``HTTP_FENCING_TOKEN``, in which a header that came twice is a list, and
a server may read a name with an underscore as one with a hyphen. A list is refused here. The name is up to the server:
gunicorn and waitress drop such headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fencing_sdk._values.claim import Token
from fencing_sdk._values.token_wire import ACCEPTED_HEADERS
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.integrations._incoming import Checkpoint, RouteTemplate, presented
from fencing_sdk.sync import SyncLockClient

R = TypeVar("R")

_NAME, _OLD_NAME = ("HTTP_" + name.upper().replace("-", "_") for name in ACCEPTED_HEADERS)


def token_of(variables: Mapping[str, Any]) -> Token | None:
    """
    Return the one token in the *variables* of a request, or None.

    Raises:
        RequestRefused: it is malformed, or came twice.
    """
    found = [[variables[name]] if name in variables else [] for name in (_NAME, _OLD_NAME)]
    return presented(*found)


def sent_target(variables: Mapping[str, Any]) -> bytes | None:
    """Return the target of a request as it was sent, from one of two variables that are no part of WSGI, or None."""
    target = variables.get("REQUEST_URI") or variables.get("RAW_URI")
    return target.encode("latin-1", "replace") if isinstance(target, str) else None


class BlockingCheckpoint(Checkpoint[R]):
    """
    What a middleware checks in a request of type *R*, in the thread that serves it.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    __slots__ = ("_locks",)

    def __init__(
        self,
        guard: Guard | None,
        resource: str | Callable[[R], str | None] | None,
        read: Callable[[R], Token | None],
        path_of: Callable[[R], tuple[str, bytes | None]],
        *,
        path: str | None,
        locks: SyncLockClient | None,
        methods: Iterable[str],
        required: bool,
        stale_status: int,
    ) -> None:
        named = _naming(resource, path, path_of)
        super().__init__(guard, named, read, methods=methods, required=required, stale_status=stale_status)
        self._locks = _check_locks(locks, guard)

    def admit(self, request: R, method: str) -> None:
        """
        Refuse a request that comes too late.

        Raises:
            FencingError: as `Checkpoint.question` and the guard.
        """
        question = self.question(request, method)
        if question is not None and self.guard is not None and self._locks is not None:
            self._locks.run(self.guard.raise_to, *question)


def _check_locks(locks: object, guard: Guard | None) -> SyncLockClient | None:
    if isinstance(locks, SyncLockClient) or (locks is None and guard is None):
        return locks
    msg = f"locks must be a client of fencing_sdk.sync, in whose thread the guard is asked, not {shown(locks)}"
    raise ConfigurationError(msg)


def _naming(
    resource: str | Callable[[R], str | None] | None,
    path: str | None,
    path_of: Callable[[R], tuple[str, bytes | None]],
) -> Callable[[R], str | None] | None:
    if isinstance(resource, str):
        template = RouteTemplate(resource, path=path)
        return lambda request: template.match(*path_of(request))
    if path is not None:
        msg = "path goes with a resource that is a template; a callable gets the whole request"
        raise ConfigurationError(msg)
    return resource
