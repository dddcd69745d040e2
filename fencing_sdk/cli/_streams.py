"""Ends of commands, and what they write to: to streams that may be closed or full or take ASCII alone, and to files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from fencing_sdk.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from rich.console import Console


class Exit(IntEnum):
    """The exit codes of the commands themselves, from sysexits.h where it has one."""

    USAGE = 2
    UNAVAILABLE = 69
    OUTPUT = 74
    TAKEN = 75
    LOST = 76
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class OutputClosedError(Exception):
    """Standard output takes no more. Its cause says why: the reader has gone, as ``head`` does, or a disk is full."""


class Watched:
    """A stream that raises its errors as `OutputClosedError`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _raising():
            return self._stream.write(text)

    def flush(self) -> None:
        with _raising():
            self._stream.flush()


@contextlib.contextmanager
def _raising() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputClosedError from error


def write_out(text: str) -> None:
    """Write *text* to standard output, as it is."""
    if sys.stdout is None:
        return
    with _raising():
        sys.stdout.write(text)
        sys.stdout.flush()


def escape_what_cannot_be_shown() -> None:
    """Have standard output escape a character that it cannot write, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def harmless(text: str, *, but: str = "") -> str:
    """Escape what a name in a recording, or the answer of a store, could do to a terminal; *but* is kept."""
    return "".join(char if char.isprintable() or char in but else ascii(char)[1:-1] for char in text)


def say(message: str) -> None:
    """Print one line on standard error. A closed one is not a reason for anything else to fail."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"fencing: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Lead a broken *stream* nowhere: Python's own flush at the end would turn the exit code into 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def console() -> Console:
    """Return a console on standard output that raises `OutputClosedError` where rich would exit with code 1."""
    from rich.console import Console  # noqa: PLC0415  (rich takes longer than the rest of the start)

    return Console(file=None if sys.stdout is None else cast("IO[str]", Watched(sys.stdout)))


def check_output(path: Path) -> None:
    """Refuse a *path* at which no file can be written. Nothing is created, so a later write may fail all the same."""
    if problem := _problem(path):
        msg = f"cannot write {shown(str(path))}: {os.strerror(problem)}"
        raise ConfigurationError(msg)


def _problem(path: Path) -> int:
    """Return the error that writing would end with, or 0 if no error can be foreseen."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return errno.EISDIR
        return 0 if os.access(path, os.W_OK) else errno.EACCES
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.errno or errno.EIO
    try:
        path.parent.stat()
    except OSError as error:
        return error.errno or errno.EIO
    return 0 if os.access(path.parent, os.W_OK | os.X_OK) else errno.EACCES
