"""
An adapter for each store. Here: from a URL to its backend, without loading the drivers of the others.

A scheme is looked up among the built-in backends, then among the entry points of the group
``fencing_sdk.backends``: each names a callable ``from_url(url, **options) -> Backend``.

A URL may hold a password, and one that was not percent-encoded may end up in any part of it. So
no part of a URL but a well-formed scheme is ever repeated in a message.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from fencing_sdk._values.drivers import daemon_threads_allowed, install, missing
from fencing_sdk._values.url import nearest, split_url
from fencing_sdk.abc import Backend
from fencing_sdk.errors import ConfigurationError, UnsupportedError, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fencing_sdk.backends"
_OF_A_LOCK = {"ttl", "wait", "safety_buffer", "heartbeat_interval", "max_hold", "fences", "backoff"}

Opener = Callable[..., Backend]

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+._-]{0,31})://[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class Builtin:
    """Where a built-in backend lives, and the extra that installs its driver."""

    module: str
    extra: str | None = None


_KAHUNA = Builtin("fencing_sdk.backends.kahuna")
_ETCD = Builtin("fencing_sdk.backends.etcd")
_REDIS = Builtin("fencing_sdk.backends.redis", extra="redis")
_REDIS_QUORUM = Builtin("fencing_sdk.backends.redis.quorum", extra="redis")
_POSTGRESQL = Builtin("fencing_sdk.backends.postgresql", extra="postgresql")
_MYSQL = Builtin("fencing_sdk.backends.mysql", extra="mysql")
_ZOOKEEPER = Builtin("fencing_sdk.backends.zookeeper", extra="zookeeper")

ROWS = Builtin("fencing_sdk.rows._url")
"""Rows of an application's own tables: only to look at, and to take one away from its holder."""
_ROWS_PREFIX = "rows+"

BUILTIN = {
    "memory": Builtin("fencing_sdk.backends.memory"),
    "sqlite": Builtin("fencing_sdk.backends.sqlite"),
    "kahuna": _KAHUNA,
    "kahuna+https": _KAHUNA,
    "etcd": _ETCD,
    "etcd+https": _ETCD,
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "redis+unix": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "redis+quorum": _REDIS_QUORUM,
    "rediss+quorum": _REDIS_QUORUM,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    "postgresql": _POSTGRESQL,
    "postgres": _POSTGRESQL,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "zk": _ZOOKEEPER,
    "zookeeper": _ZOOKEEPER,
}

_SQLALCHEMY = {"postgresql", "postgres", "sqlite", "mysql", "mariadb"}
"""Schemes to which SQLAlchemy adds the name of a driver, as in ``postgresql+asyncpg``."""


def from_url(url: str, **options: object) -> Backend:
    """
    Make the backend for *url*. Nothing is opened yet.

    Options may stand in the URL's query or be passed here; a backend refuses those it does not know.

    Raises:
        ConfigurationError: unknown scheme, missing driver, or a bad option. The URL itself, which
            may hold a password, is never part of the message.
        UnsupportedError: this is a subinterpreter, and the driver does not work there.
    """
    if not url:
        msg = "url is empty; is the variable set that it comes from? It must look like 'redis://host:6379'"
        raise ConfigurationError(msg)
    match = _URL.fullmatch(url)
    if match is None:
        msg = (
            "url must look like 'redis://host:6379' or 'sqlite:///locks.db', "
            "without a blank in front and without control characters"
        )
        raise ConfigurationError(msg)
    scheme = match[1]
    builtin = ROWS if scheme.startswith(_ROWS_PREFIX) else BUILTIN.get(scheme)
    opener = _load_plugin(scheme) if builtin is None else _load(builtin)
    return opener(url, **options)


def _load(builtin: Builtin) -> Opener:
    try:
        module = importlib.import_module(builtin.module)
    except ModuleNotFoundError as error:
        if builtin.extra is None and error.name != builtin.module:
            raise
        raise ConfigurationError(missing(error.name, builtin.extra)) from error
    except (ImportError, AttributeError) as error:
        if builtin.extra is None:
            raise
        if not daemon_threads_allowed():
            msg = (
                f"the driver cannot be used in a subinterpreter ({error}); use it in the main interpreter or a process"
            )
            raise UnsupportedError(msg) from error
        msg = f"the installed driver cannot be used ({error}); for a version that works, run: {install(builtin.extra)}"
        raise ConfigurationError(msg) from error
    opener: Opener = module.from_url
    return opener


def _load_plugin(scheme: str) -> Opener:
    plugins = {entry.name: entry for entry in _plugins()}
    if scheme not in plugins:
        plain, _, driver = scheme.partition("+")
        if driver and plain in _SQLALCHEMY:
            msg = f"drop '+{driver}', which names a driver for SQLAlchemy: the URL of a backend begins with {plain}://"
            raise ConfigurationError(msg)
        stores = {builtin.module: known for known, builtin in reversed(BUILTIN.items())}  # the first scheme of each
        known = ", ".join(sorted({*stores.values(), *plugins}))
        msg = f"no backend for {shown(scheme)} URLs{nearest(scheme, (*BUILTIN, *plugins))}; known are {known}"
        raise ConfigurationError(msg)
    entry = plugins[scheme]
    try:
        opener: Opener = entry.load()
    except (ImportError, AttributeError) as error:
        msg = f"the backend for {shown(scheme)} URLs, {shown(entry.value)}, cannot be loaded: {error}"
        raise ConfigurationError(msg) from error
    return opener


def _plugins() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415  (20 ms, and most programs have no plugin)

    return entry_points(group=GROUP)


def take_options(
    url: str, options: dict[str, object], known: tuple[str, ...], *, public: Collection[str] = ()
) -> dict[str, object]:
    """
    Merge the query of *url* and *options*, and refuse what is not *known*.

    The error names an unknown option of the query only if it is *public*, since it may be a part of a password.

    Raises:
        ConfigurationError: an option is unknown or given twice, or the URL cannot be read.
    """
    stated = f"known are {', '.join(known) or 'none'}"
    for key in options:
        if key not in known:
            of_a_lock = f" (it belongs to a lock: locks.lock(name, {key}=...))" if key in _OF_A_LOCK else ""
            msg = f"unknown option {shown(key)} of this backend{of_a_lock or nearest(key, known)}; {stated}"
            raise ConfigurationError(msg)
    merged = dict(options)
    for key, value in parse_qsl(split_url(url).query, keep_blank_values=True):
        if key in public and key not in known:
            msg = f"option {key} of the url's query is not one that the driver takes, remove it; {stated}"
            raise ConfigurationError(msg)
        if key not in known:
            near = nearest(key, known)
            msg = f"unknown option in the url's query{near}; {stated} (a '?' or '&' in a password is written %3F, %26)"
            raise ConfigurationError(msg)
        if key in merged:
            msg = f"option {key} occurs twice"
            raise ConfigurationError(msg)
        merged[key] = value
    return merged
