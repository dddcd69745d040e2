"""From a URL, or the environment, to a client."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fencing_sdk._arguments import check_backend, check_threads_are_real
from fencing_sdk._client import LockClient
from fencing_sdk._recording import Recorder
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import DEFAULT_DRIFT, Seconds
from fencing_sdk._values.token_wire import ENV_RECORD, ENV_URL
from fencing_sdk.abc import Backend
from fencing_sdk.backends import from_url
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.events import Observer


def connect(
    url: str | Backend | None = None,
    *,
    namespace: str = "",
    observers: Sequence[Observer] = (),
    drift: float = DEFAULT_DRIFT,
    clock: Clock | None = None,
    watch_stalls: bool = True,
    drain: Seconds | None = None,
    metadata: str | None = None,
    **options: object,
) -> LockClient:
    """
    Make a client for the store at *url*. Nothing is sent to the store here, so it is fine at import time.

    When the environment variable ``FENCING_RECORD`` names a file, it is opened here, and every event is appended to it.

    Args:
        url: ``"memory://"``, ``"sqlite:///locks.db"``, a backend object, or None for the value of
            the environment variable ``FENCING_URL``.

        namespace: A prefix for every lock name, followed by a colon. Lock ``b:c`` in namespace ``a`` is lock ``c`` in
            namespace ``a:b``. Fences have none: lock ``c`` raises the fence of ``c`` in each namespace.

        observers: Callables that receive every event.

        drift: How much faster or slower than ours the store's clock may run, as a fraction. 0.01 by default.

        clock: The monotonic clock of deadlines. The default goes on while the machine is suspended.

        watch_stalls: Whether a sleeping thread looks for the code that blocks the event loop when
            a heartbeat is overdue.

        drain: Seconds for which closing the client lets bodies go on: for the lifespan of an application.

        metadata: The metadata of every lock that has none of its own: see `LockClient`. Not a place for secrets.

        **options: Options of the backend, as they may also stand in the URL's query.

    Raises:
        ConfigurationError: there is no such backend, its driver is missing, an option is unknown, or the file of
            ``FENCING_RECORD`` cannot be opened.
        UnsupportedError: gevent or eventlet has replaced the threads of this process.
    """
    check_threads_are_real()
    if url is None:
        url = os.environ.get(ENV_URL)
        if not url:
            msg = f"connect() needs a URL such as 'sqlite:///locks.db', or {ENV_URL} in the environment"
            raise ConfigurationError(msg)
    if isinstance(url, str):
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
        drift=drift,
        clock=clock,
        watch_stalls=watch_stalls,
        drain=drain,
        metadata=metadata,
    )


def _recorder(path: str) -> Recorder:
    try:
        return Recorder(path)
    except ConfigurationError as error:
        msg = f"{ENV_RECORD} in the environment: {error}"
        raise ConfigurationError(msg) from error
