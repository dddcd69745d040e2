"""
Locks for the processes of one machine, in one SQLite file: no server, and no dependency.

    connect("sqlite:///locks.db")               # relative to the working directory
    connect("sqlite:////var/lib/app/locks.db")  # absolute

Tokens: hybrid by default, kept in the file. Clock: the machine's boot clock, read under the
file's write lock. Waiters: first come, first served, across processes, woken by a datagram.

    __init__.py      the backend, its options and its URL
    store.py         the one thread that touches SQLite, and what the event loop asks of it
    rows.py          what the thread does with the open file, and the rows of one name
    schema.sql       the tables
    file.py          one connection to the file: transactions, patience, and the errors of SQLite
    file_system.py   what the file is on, for the warning of an opening and for the doctor
    waiter_signs.py  the datagram that wakes a waiter in another process, and the file for signs of life
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

from fencing_sdk._values.clock import wall_ticks
from fencing_sdk._values.url import option_names, split_url
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.row_backend import RowBackend
from fencing_sdk.backends._shared.rules import token_source
from fencing_sdk.backends.sqlite.file import SYNCHRONOUS
from fencing_sdk.backends.sqlite.store import SqliteStore
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["SqliteBackend", "from_url"]


class SqliteBackend(RowBackend):
    """
    A lock service in a file, shared by every process that names the same one.

    Not for network file systems, and not across machines. Processes must see the same boot clock:
    containers with a time namespace of their own do not exclude each other, only their tokens do.

    Args:
        path: The file, created when missing; its folder is not, and ``~`` is not expanded. A relative
            path counts from the working directory at the first call.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with a new file.

        synchronous: ``"full"``, or ``"normal"``, which saves an fsync per grant and may forget the
            last grants in a power failure (not in a crash of the process).

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: str = "hybrid", synchronous: str = "full") -> None:
        if synchronous not in tuple(SYNCHRONOUS):
            msg = f"synchronous must be 'full' or 'normal', got {shown(synchronous)}"
            raise ConfigurationError(msg)
        self._path = _checked_path(path)
        self._durable, self._hybrid = synchronous != "normal", tokens != "counter"
        super().__init__(SqliteStore(self._path, synchronous=synchronous, next_token=token_source(tokens, wall_ticks)))


def from_url(url: str, **options: object) -> SqliteBackend:
    """
    Make a backend for ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; see `SqliteBackend`.

    The path is percent-decoded: ``%3F`` is a question mark and ``%23`` a hash.

    Raises:
        ConfigurationError: the URL names no file, or an option is unknown.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(SqliteBackend))
    parts = split_url(url)
    if parts.user is not None or parts.hosts:
        msg = "write sqlite:///relative.db or sqlite:////absolute.db; a file URL has no host, so it needs three slashes"
        raise ConfigurationError(msg)
    return SqliteBackend(unquote(parts.path.removeprefix("/"), errors="surrogateescape"), **chosen)


def _checked_path(path: object) -> str:
    """Return *path* as a text; raise `ConfigurationError` if it names no file."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        msg = f"path must be a str or a pathlib.Path, not {type(path).__name__}"
        raise ConfigurationError(msg)
    if path in {"", ":memory:"}:
        msg = "locks in SQLite need a file, such as sqlite:///locks.db; within one process use memory://"
        raise ConfigurationError(msg)
    if "\0" in path:
        msg = "path has a NUL character"
        raise ConfigurationError(msg)
    return path
