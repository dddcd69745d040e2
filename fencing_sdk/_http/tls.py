"""
Checks of certificates. No option switches the check off, and a mistyped option is an error.

Certificates are replaced while clients run, so each new connection reads the files again. If they do not fit together
at that moment, connecting fails and is tried again like any other failure.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from functools import partial

from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["TlsContext", "complaint_about", "distrust", "tls_context", "wants_certificate"]

TlsContext = Callable[[], ssl.SSLContext]
"""Returns the context for one new connection. Raises OSError if the files cannot be used at the moment."""


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
    files = {name: path for name, path in {"ca": ca, "cert": cert, "key": key}.items() if path is not None}
    if wrong := {name: path for name, path in files.items() if not isinstance(path, str | os.PathLike) or not path}:
        name, path = wrong.popitem()
        msg = f"{name} must be the path of a PEM file, not {shown(path)}"
        raise ConfigurationError(msg)
    if not tls and (files or context is not None):
        way = "write ?tls=true, or pass tls=True" if scheme is None else f"use {scheme}://, or tls=True"
        msg = f"{', '.join([*files, *(['ssl_context'] if context else [])])}: for TLS alone; {way}"
        raise ConfigurationError(msg)
    if files and context is not None:
        msg = (
            f"{next(iter(files))} and ssl_context exclude each other; use the context alone, and load the file into it"
        )
        raise ConfigurationError(msg)
    if key is not None and cert is None:
        msg = "key belongs to a certificate; pass cert=/path/to/client.pem too"
        raise ConfigurationError(msg)
    if not tls:
        return None
    if context is not None:
        return lambda: context
    return _from_files(partial(_load, ca, cert, key), read_again=bool(files))


def _from_files(load: Callable[[], ssl.SSLContext], *, read_again: bool) -> TlsContext:
    first = load()

    def current() -> ssl.SSLContext:
        try:
            return load() if read_again else first
        except ConfigurationError as error:
            raise OSError(*error.args) from error

    return current


def _load(
    ca: object,
    cert: object,
    key: object,
    *,
    password: str = "",
    names: tuple[str, str, str] = ("ca", "cert", "key"),
) -> ssl.SSLContext:
    """
    Make a context that trusts the authorities of *ca*, or the system's, and sends *cert*.

    Raises:
        ConfigurationError: a file cannot be used. The error has its path, and its option as *names* has it.
    """
    authority, chain, private = (None if path is None else os.fsdecode(path) for path in (ca, cert, key))  # type: ignore[arg-type]  # a driver's, too
    option, files = f"{names[0]} must be the path of a PEM file of certificates", [authority]
    try:
        context = ssl.create_default_context(cafile=authority)
        option = f"{names[1]} must be the path of a PEM file of a certificate, whose key is there or in {names[2]}"
        files = [chain, private]
        if chain is not None:
            context.load_cert_chain(chain, private, password=lambda: password)  # never ask at the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: a path with a null byte
        # A key that was passed instead of a path is not repeated.
        shown_files = ["its content" if "\n" in path or "--" in path else ascii(path) for path in files if path]
        msg = f"{option}; {' and '.join(shown_files)} cannot be read as one ({type(error).__name__})"
        raise ConfigurationError(msg) from error
    return context


def complaint_about(*files: object, names: tuple[str, str, str], password: object = None) -> str | None:
    """Return which of a driver's *files*, an authority, a certificate and its key, is unusable, or None."""
    try:
        _load(*files, password=str(password or ""), names=names)
    except ConfigurationError as error:
        return str(error)
    return None


_OF_ANOTHER_HOST, _OUTDATED = {62, 64}, {9, 10}
"""OpenSSL's codes: for a host name, and an IP address; not valid yet, and no more."""


def distrust(error: ssl.SSLCertVerificationError, option: str) -> str:
    """Return why a server's certificate is refused, and the *option* that names its authority."""
    if error.verify_code in _OF_ANOTHER_HOST:
        return "the server's certificate is for another host than the one you named"
    if error.verify_code in _OUTDATED:
        return "the server's certificate has expired, or is not valid yet"
    return f"the server's certificate is not trusted; name its authority with {option}=/path/to/ca.pem"


def wants_certificate(error: BaseException | None) -> bool:
    """Return whether the server has ended the handshake because it wants another certificate of the client."""
    reason = getattr(error, "reason", None) or ""  # only OpenSSL sets it; a version stands before the alert
    alert = reason.rpartition("ALERT_")[2] if isinstance(error, ssl.SSLError) and "ALERT_" in reason else ""
    return "CERTIFICATE" in alert or alert in {"ACCESS_DENIED", "HANDSHAKE_FAILURE", "UNKNOWN_CA"}
