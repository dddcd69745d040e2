"""
Checks of the front's arguments, made when an object is built and before anything is sent.

Every refusal is a `ConfigurationError` that names the parameter and says what it takes.
"""

from __future__ import annotations

import inspect
import sys
import unicodedata
from collections.abc import Sequence
from typing import TypedDict

from fencing_sdk._engine.acquisition import Backoff
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.reports import LABEL_LIMIT
from fencing_sdk._values.timing import Seconds
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import ConfigurationError, UnsupportedError, shown

_REASON_LIMIT = 200
"""Characters of an operator's reason."""

Fence = Guard | tuple[Guard, str]
"""A guard whose resource is named like the lock, or a guard and the name of its resource."""


class LockOptions(TypedDict, total=False):
    """The parameters of `LockClient.lock` besides the name."""

    ttl: Seconds
    wait: Seconds | None
    safety_buffer: Seconds | None
    heartbeat_interval: Seconds | None
    max_hold: Seconds | None
    fences: Sequence[Fence]
    backoff: Backoff
    label: str | None


class ElectionOptions(TypedDict, total=False):
    """The parameters of `LockClient.election` besides the name: those of a lock without ``wait``, and one more."""

    ttl: Seconds
    finish_within: Seconds
    safety_buffer: Seconds | None
    heartbeat_interval: Seconds | None
    max_hold: Seconds | None
    fences: Sequence[Fence]
    backoff: Backoff
    label: str | None


_REDIS_CLIENT = "write connect(RedisBackend(client)), with RedisBackend from fencing_sdk.backends.redis"
_DRIVERS = {
    "redis": _REDIS_CLIENT,
    "valkey": _REDIS_CLIENT,
    "asyncpg": "write connect('postgresql://user:password@host/database')",
    "psycopg": "write connect('postgresql://user:password@host/database')",
    "sqlalchemy": "write connect('postgresql://user:password@host/database') or connect('sqlite:///locks.db')",
    "sqlite3": "write connect('sqlite:///locks.db')",
    "kazoo": "write connect('zk://host:2181')",
}
"""The call to write instead of passing a client of another package."""


_VERBS = ("draw", "keep", "give_back", "end", "tickets", "names", "listen", "aclose", "modes", "rings")


def check_backend(backend: object, *, takes: str = "backend must be") -> None:
    """Refuse what lacks a call of the contract; *takes* begins the message."""
    if isinstance(backend, type):
        msg = f"{takes} an object, not the class: call {backend.__name__}(...)"
        raise ConfigurationError(msg)
    drivers = {parent.__module__.partition(".")[0] for parent in type(backend).__mro__} & _DRIVERS.keys()
    if drivers:
        msg = f"{takes} a backend, and {type(backend).__name__} is a client of a driver; {_DRIVERS[drivers.pop()]}"
        raise ConfigurationError(msg)
    missing = [call for call in _VERBS if not hasattr(backend, call)]
    if missing:
        msg = (
            f"{takes} an object with the verbs of fencing_sdk.abc.Backend, "
            f"{type(backend).__name__} lacks {', '.join(missing)}"
        )
        raise ConfigurationError(msg)


def check_shares(backend: Backend, what: str) -> None:
    """
    Refuse a backend in which one owner alone may hold a name.

    Raises:
        UnsupportedError: its modes are those of a lock alone.
    """
    if "permit" not in backend.modes:
        msg = f"{backend_name(backend)} has no {what}: its store lets one owner hold a name"
        raise UnsupportedError(msg)


def check_flag(flag: object, parameter: str) -> bool:
    """Return a switch, not a number or a text."""
    if not isinstance(flag, bool):
        msg = f"{parameter} must be True or False, got {shown(flag)}"
        raise ConfigurationError(msg)
    return flag


def check_backoff(backoff: object) -> Backoff:
    """Return a wait strategy, which is called and never awaited."""
    if not callable(backoff) or isinstance(backoff, type) or inspect.iscoroutinefunction(backoff):
        msg = f"backoff must be a tenacity wait strategy such as wait_random(0, 1), not {type(backoff).__name__}"
        raise ConfigurationError(msg)
    return backoff


def check_label(label: object) -> str | None:
    """Return a text that every store can keep."""
    if label is None:
        return None
    if (
        not isinstance(label, str)
        or len(label) > LABEL_LIMIT
        or any(char == "\0" or unicodedata.category(char) == "Cs" for char in label)
    ):
        msg = f"label must be a str of at most {LABEL_LIMIT} characters without NUL and lone surrogates"
        raise ConfigurationError(msg)
    return label


def check_fences(fences: object) -> tuple[tuple[Guard, str | None], ...]:
    """Return the guards to raise, each with its resource; None means it is named like the lock."""
    if isinstance(fences, str) or not isinstance(fences, Sequence):
        msg = "fences must be a sequence of guards, such as fences=[guard]"
        raise ConfigurationError(msg)
    return tuple(_check_fence(fence) for fence in fences)


def _check_fence(fence: object) -> tuple[Guard, str | None]:
    guard, resource = fence if isinstance(fence, tuple) and len(fence) == 2 else (fence, None)  # noqa: PLR2004
    if isinstance(guard, type) or not isinstance(guard, Guard):
        msg = f"fences must hold guards or (guard, resource) pairs, not {shown(guard)}"
        raise ConfigurationError(msg)
    return guard, None if resource is None else check_name(resource, parameter="resource")


def check_guards(guards: object) -> Sequence[Guard]:
    """Return the guards that a diagnosis examines."""
    if not isinstance(guards, Sequence) or not all(isinstance(guard, Guard) for guard in guards):
        msg = f"guards must be a list of guards, not {shown(guards)}"
        raise ConfigurationError(msg)
    return guards


def check_reason(reason: object) -> str:
    """Return *reason* if an operator may give it to a holder."""
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _REASON_LIMIT or not reason.isprintable():
        msg = f"reason must be a text of 1 to {_REASON_LIMIT} printable characters for the holder, not {shown(reason)}"
        raise ConfigurationError(msg)
    return reason


_PATCHED = ("threading", "thread", "select", "socket")
"""Functions that an event loop needs unpatched. gevent and eventlet have names of their own for threads."""


def check_threads_are_real() -> None:
    """
    Refuse a process whose threads are greenlets: an event loop in one of them would stop all others, or never run.

    Raises:
        UnsupportedError: gevent or eventlet has patched it.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    for library, patched in (
        ("gevent", getattr(gevent, "is_module_patched", None)),
        ("eventlet", getattr(eventlet, "is_monkey_patched", None)),
    ):
        if patched is not None and any(map(patched, _PATCHED)):
            msg = (
                f"{library} has replaced threads and sockets in this process, and fencing_sdk needs real ones; "
                "run the worker with threads instead, such as gunicorn --worker-class gthread or celery --pool threads"
            )
            raise UnsupportedError(msg)
