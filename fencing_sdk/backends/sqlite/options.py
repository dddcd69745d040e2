"""From a URL and options to the arguments of `SqliteBackend`, each checked."""

from __future__ import annotations

import os
from urllib.parse import unquote

from fencing_sdk._values.store_url import split_url
from fencing_sdk.backends.sqlite.connection.file import SYNCHRONOUS
from fencing_sdk.errors import ConfigurationError, shown

OPTIONS = ("tokens", "synchronous")


def path_of(url: str) -> str:
    """
    Read the path of ``sqlite:///relative.db`` or ``sqlite:////absolute.db``.

    Raises:
        ConfigurationError: the URL has a host.
    """
    parts = split_url(url)
    if parts.user is not None or parts.hosts:
        msg = (
            "write sqlite:///relative.db or sqlite:////absolute.db; the third slash ends the host, which a file has not"
        )
        raise ConfigurationError(msg)
    return unquote(parts.path.removeprefix("/"), errors="surrogateescape")


def check_path(path: object) -> str:
    """
    Return *path* as a text.

    Raises:
        ConfigurationError: it names no file.
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        msg = f"path must be a str or a pathlib.Path, not {type(path).__name__}"
        raise ConfigurationError(msg)
    if path in {"", ":memory:"}:
        msg = "locks in SQLite need a file, such as sqlite:///locks.db; within one process use memory://"
        raise ConfigurationError(msg)
    if "\0" in path:
        msg = f"path {shown(path)} has a NUL character"
        raise ConfigurationError(msg)
    return path


def check_synchronous(synchronous: object) -> str:
    """
    Return *synchronous*.

    Raises:
        ConfigurationError: it is neither ``"full"`` nor ``"normal"``.
    """
    if not isinstance(synchronous, str) or synchronous not in SYNCHRONOUS:
        msg = f"synchronous must be 'full' or 'normal', got {shown(synchronous)}"
        raise ConfigurationError(msg)
    return synchronous
