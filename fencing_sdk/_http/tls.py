"""
How certificates are checked. No option switches the check off, and a mistyped option is an error.

Certificates are replaced while clients run. So each new connection looks whether the files have changed, and reads them
again then. Files that do not fit together are being replaced: until they do, the last ones that did are used.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable

from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["TlsContext", "from_files", "tls_context"]

TlsContext = Callable[[], ssl.SSLContext]
"""Returns the context for a new connection: the same one until a file has changed."""


def from_files(make: Callable[[], ssl.SSLContext], paths: Iterable[object]) -> TlsContext:
    """
    Make a context of the files at *paths*, and again when one of them has changed.

    Raises:
        ConfigurationError: *make* raises it now. Later the earlier context stays in use instead.
    """
    files = [os.fsdecode(path) for path in paths if isinstance(path, str | os.PathLike)]
    seen, context = [_state(file) for file in files], make()

    def current() -> ssl.SSLContext:
        nonlocal seen, context
        now = [_state(file) for file in files]
        if now != seen:
            try:
                context = make()
            except ConfigurationError:
                return context
            seen = now
        return context

    return current


def _state(file: str) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None: it is not there."""
    try:
        found = os.stat(file)  # noqa: PTH116  (a Path would be made for each connection)
    except (OSError, ValueError):  # a path with a null byte
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def tls_context(
    *, tls: object, scheme: str, ca: object = None, cert: object = None, key: object = None, context: object = None
) -> TlsContext | None:
    """
    Make TLS contexts from the files that the options name; None without TLS.

    Raises:
        ConfigurationError: an option has a wrong type, a file cannot be read, or two options exclude each other.
    """
    if not isinstance(tls, bool):
        msg = f"tls must be True or False, got {shown(tls)}"
        raise ConfigurationError(msg)
    if context is not None and not isinstance(context, ssl.SSLContext):
        msg = f"ssl_context must be an ssl.SSLContext, not {type(context).__name__}"
        raise ConfigurationError(msg)
    files = {"ca": ca, "cert": cert, "key": key}
    given = [name for name, path in files.items() if path is not None]
    for name in given:
        _check_path(name, files[name])
    if not tls and (given or context is not None):
        msg = (
            f"{', '.join([*given, *(['ssl_context'] if context else [])])}: for TLS alone; use {scheme}://, or tls=True"
        )
        raise ConfigurationError(msg)
    if given and context is not None:
        msg = f"{given[0]} and ssl_context exclude each other; use the context alone, and load the file into it"
        raise ConfigurationError(msg)
    if key is not None and cert is None:
        msg = "key is that of a certificate; pass cert=/path/to/client.pem too"
        raise ConfigurationError(msg)
    if not tls:
        return None
    return from_files(lambda: _made(ca, cert, key), files.values()) if context is None else lambda: context


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        msg = f"{name} must be the path of a PEM file, not {shown(path)}"
        raise ConfigurationError(msg)


def _made(ca: object, cert: object, key: object) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=_path(ca))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _unreadable(ca, error, name="ca") from error
    if cert is not None:
        try:
            context.load_cert_chain(_path(cert) or "", _path(key), password=lambda: "")  # never ask at the terminal
        except (OSError, ValueError) as error:
            raise _unreadable(cert, error, name="cert") from error
    return context


def _path(path: object) -> str | None:
    return None if path is None else os.fsdecode(path)  # type: ignore[arg-type]  # checked above


def _unreadable(path: object, error: Exception, *, name: str) -> ConfigurationError:
    what = "certificates" if name == "ca" else "a certificate, with its key there or in key="
    why = type(error).__name__
    msg = f"{name} must be the path of a PEM file of {what}; {shown(_path(path))} cannot be read as one ({why})"
    return ConfigurationError(msg)
