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

__all__ = ["TlsContext", "complaint_about", "distrust", "from_files", "load_files", "tls_context", "wants_certificate"]

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


_LONGEST_SHOWN = 300
"""Characters of a path that an error has in full: the end of it says which file it is."""


def tls_context(
    *,
    tls: object,
    scheme: str | None,
    ca: object = None,
    cert: object = None,
    key: object = None,
    context: object = None,
) -> TlsContext | None:
    """
    Make TLS contexts from the files that the options name; None without TLS. *scheme*: that of a URL with TLS, if any.

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
        way = "write ?tls=true, or pass tls=True" if scheme is None else f"use {scheme}://, or tls=True"
        msg = f"{', '.join([*given, *(['ssl_context'] if context else [])])}: for TLS alone; {way}"
        raise ConfigurationError(msg)
    if given and context is not None:
        msg = f"{given[0]} and ssl_context exclude each other; use the context alone, and load the file into it"
        raise ConfigurationError(msg)
    if key is not None and cert is None:
        msg = "key belongs to a certificate; pass cert=/path/to/client.pem too"
        raise ConfigurationError(msg)
    if not tls:
        return None
    return (
        from_files(lambda: load_files(ca=ca, cert=cert, key=key), files.values())
        if context is None
        else lambda: context
    )


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        msg = f"{name} must be the path of a PEM file, not {shown(path)}"
        raise ConfigurationError(msg)


def load_files(
    context: ssl.SSLContext | None = None,
    *,
    ca: object = None,
    cert: object = None,
    key: object = None,
    password: str = "",
    names: tuple[str, str, str] = ("ca", "cert", "key"),
) -> ssl.SSLContext:
    """
    Have *context*, or a new one, trust the authorities of *ca*, and send *cert*, whose key is there or in *key*.

    Raises:
        ConfigurationError: a file cannot be used. The error has its path, and its option as *names* has it.
    """
    of_ca, of_cert, of_key = names
    paths = [_path(path) for path in (ca, cert, key)]
    for name, path in zip(names, paths, strict=True):
        _check_readable(name, path)
    authority, chain, private = paths
    try:
        if context is None:
            context = ssl.create_default_context(cafile=authority)
        elif authority is not None:
            context.load_verify_locations(authority)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        msg = f"{of_ca} must be the path of a PEM file of certificates; {_shown(authority)} cannot be read as one"
        raise ConfigurationError(msg) from error
    try:
        if chain is not None:
            context.load_cert_chain(chain, private, password=lambda: password)  # never ask at the terminal
    except (OSError, ValueError) as error:
        files = " and ".join(_shown(path) for path in (chain, private) if path is not None)
        msg = (
            f"{of_cert} must be the path of a PEM file of a certificate, whose key is there or in {of_key}; "
            f"{files} cannot be used so"
        )
        raise ConfigurationError(msg) from error
    return context


def complaint_about(*files: object, names: tuple[str, str, str], password: object = None) -> str | None:
    """Return which of a driver's *files*, an authority, a certificate and its key, is unusable, or None."""
    ca, cert, key = files
    try:
        load_files(ca=ca, cert=cert, key=key, password=str(password or ""), names=names)
    except ConfigurationError as error:
        return str(error)
    return None


def _check_readable(name: str, path: str | None) -> None:
    try:
        if path is not None:
            with open(path, "rb"):  # noqa: PTH123  (a driver takes what is not a Path)
                pass
    except (OSError, ValueError) as error:  # a path with a null byte
        msg = f"{name} must be the path of a PEM file; {_shown(path)} cannot be read ({type(error).__name__})"
        raise ConfigurationError(msg) from error


def _shown(path: str | None) -> str:
    if path is None or "\n" in path:
        return "its content"  # a key was passed instead of a path
    return ascii(path) if len(path) <= _LONGEST_SHOWN else shown(path)


def _path(path: object) -> str | None:
    return None if path is None else os.fsdecode(path)  # type: ignore[arg-type]  # checked above


_OF_ANOTHER_HOST, _OUTDATED = {62, 64}, {9, 10}
"""OpenSSL's codes: for a host name, and an IP address; not valid yet, and no more."""


def distrust(error: ssl.SSLCertVerificationError, option: str) -> str:
    """Return why a server's certificate is refused, and the *option* that names its authority."""
    if error.verify_code in _OF_ANOTHER_HOST:
        return "the server's certificate is for another host than the one you named"
    if error.verify_code in _OUTDATED:
        return "the server's certificate has expired, or is not valid yet"
    return f"the server's certificate is not trusted; name its authority with {option}=/path/to/ca.pem"


CERTIFICATE_ALERTS = {
    "ACCESS_DENIED",
    "BAD_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REQUIRED",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_UNKNOWN",
    "HANDSHAKE_FAILURE",
    "UNKNOWN_CA",
    "UNSUPPORTED_CERTIFICATE",
}
"""TLS alerts for a client whose certificate is missing or not trusted. OpenSSL puts a version before each."""


def wants_certificate(error: BaseException | None) -> bool:
    """Return whether the server has ended the handshake because it wants another certificate of the client."""
    reason = getattr(error, "reason", None) or ""  # only OpenSSL sets it
    return isinstance(error, ssl.SSLError) and reason.rpartition("ALERT_")[2] in CERTIFICATE_ALERTS
