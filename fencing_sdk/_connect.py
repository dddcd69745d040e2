"""From a URL, or the environment, to a client."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence

from fencing_sdk._arguments import check_backend, check_threads_are_real
from fencing_sdk._client import LockClient
from fencing_sdk._values.observers import Observer, Observers, logger
from fencing_sdk._values.timing import Seconds
from fencing_sdk._values.token import ENV_RECORD, ENV_URL, ENV_URL_FILE, ENV_WITHHELD
from fencing_sdk.abc import Backend
from fencing_sdk.errors import ConfigurationError, shown

_PASSWORD = re.compile(r"://[^/?]*:[^/?]*@|[?&][a-z_]*password=")
"""Characters of a URL with a password. Some URLs without one have them too, which costs a warning at most."""


def connect(
    url: str | Backend | None = None,
    *,
    namespace: str = "",
    observers: Sequence[Observer] = (),
    drain: Seconds | None = None,
    open_wait: Seconds | None = 0.0,
    label: str | None = None,
    **options: object,
) -> LockClient:
    """
    Make a client for the store at *url*. Nothing is sent to the store here, so it is fine at import time.

    When the environment variable ``FENCING_RECORD`` names a file, it is opened here, and every event is appended to it.

    Args:
        url: ``"memory://"``, ``"sqlite:///locks.db"``, a backend object, or None for the value of the environment
            variable ``FENCING_URL``, or for the one line of the file that ``FENCING_URL_FILE`` names.

        namespace: A prefix for every lock name, followed by a colon. Lock ``b:c`` in namespace ``a`` is lock ``c`` in
            namespace ``a:b``. Fences have none: lock ``c`` raises the fence of ``c`` in each namespace.

        observers: Callables that receive every event.

        drain: Seconds for which closing the client lets bodies go on: for the lifespan of an application.

        open_wait: Seconds for which opening the client waits for a store that is away. 0, the default, asks once. None
            asks nothing: the first lock opens the connection, and its ``wait`` counts for both.

        label: The label of every lock without one of its own: see `LockClient`. Not a place for secrets.

        **options: Options of the backend, as they may also stand in the URL's query.

    Raises:
        ConfigurationError: there is no such backend, its driver is missing, an option is unknown, or the file of
            ``FENCING_RECORD`` or ``FENCING_URL_FILE`` cannot be used.
        UnsupportedError: gevent or eventlet has replaced the threads of this process.
    """
    check_threads_are_real()
    if url is None:
        found = store_of_environment(logger.warning)
        if found is None:
            msg = f"connect() needs a URL such as 'sqlite:///locks.db', or {ENV_URL} in the environment"
            raise ConfigurationError(msg)
        _, url = found
    if isinstance(url, str):
        from fencing_sdk.backends import from_url  # noqa: PLC0415  (a backend object needs no reader of URLs)

        backend = from_url(url, **options)
    else:
        check_backend(url, takes="url must be a URL or")
        if options:
            msg = f"a backend object takes no options, got {', '.join(sorted(options))}; set them on the object"
            raise ConfigurationError(msg)
        backend = url
    if record := os.environ.get(ENV_RECORD):
        observers = (Observers(observers).emit, _recorder(record))
    return LockClient(
        backend,
        namespace=namespace,
        observers=observers,
        drain=drain,
        open_wait=open_wait,
        label=label,
    )


def store_of_environment(warn: Callable[[str], object]) -> tuple[str, str] | None:
    """
    Return the variable that names a store, and the URL of that store; None if there is no such variable.

    Raises:
        ConfigurationError: both variables are set; the file cannot be used; or the URL is kept from this process.
    """
    url, path = os.environ.get(ENV_URL), os.environ.get(ENV_URL_FILE)
    if url and path:
        msg = f"{ENV_URL} and {ENV_URL_FILE} both name a store; unset one of them"
        raise ConfigurationError(msg)
    if url:
        return ENV_URL, url
    if path:
        return ENV_URL_FILE, read_url_file(path, ENV_URL_FILE, warn)
    if os.environ.get(ENV_WITHHELD):
        msg = (
            "the fencing run around this command does not pass the URL of its store on; "
            "add --pass-url to it, or name a store here"
        )
        raise ConfigurationError(msg)
    return None


def read_url_file(path: str | os.PathLike[str], name: str, warn: Callable[[str], object]) -> str:
    """
    Return the URL that stands alone in the file at *path*, and *warn* if every user may read a password there.

    Args:
        path: Anything that can be read once.

        name: The option or variable that names the file, for errors.

        warn: Called with one sentence.

    Raises:
        ConfigurationError: the file cannot be read, is empty, or has more than one line. No part of it is repeated.
    """
    where = f"{name} {shown(str(path))}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123  (which would load pathlib, for every program)
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
    except (OSError, ValueError) as error:
        msg = f"{where} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigurationError(msg) from error
    try:
        lines = content.decode("utf-8-sig").strip().splitlines()
    except UnicodeDecodeError:  # it quotes the content, so it must not become the context of an error
        lines, problem = [], "is not UTF-8"
    else:
        problem = f"has {len(lines)} lines" if lines else "is empty"
    if len(lines) != 1:
        msg = f"{where} {problem}; write the URL of the store into it, and nothing else"
        raise ConfigurationError(msg)
    if mode & stat.S_IROTH and _PASSWORD.search(lines[0]):
        warn(f"{where} has a password that every user of this machine may read; run: chmod o= FILE")
    return lines[0]


def _recorder(path: str) -> Observer:
    from fencing_sdk._recording import Recorder  # noqa: PLC0415  (few programs record)

    try:
        return Recorder(path)
    except ConfigurationError as error:
        msg = f"{ENV_RECORD} in the environment: {error}"
        raise ConfigurationError(msg) from error
