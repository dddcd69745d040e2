"""Standard output and standard error of the commands, also where they are closed or full, or take ASCII alone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

from rich.console import Console


class OutputClosedError(Exception):
    """Standard output takes no more. Its cause says why: the reader has gone, as ``head`` does, or a disk is full."""


class Output(Console):
    """A console on standard output. A closed pipe is an error of ours and not, as by default, exit code 1."""

    def __init__(self) -> None:
        super().__init__(file=None if sys.stdout is None else cast("IO[str]", _Watched(sys.stdout)))


class _Watched:
    """A stream whose errors are told as `OutputClosedError`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputClosedError from error


def write_out(text: str) -> None:
    """
    Write *text* to standard output, as it is.

    Raises:
        OutputClosedError: it takes no more.
    """
    if sys.stdout is None:
        return
    with _told():
        sys.stdout.write(text)
        sys.stdout.flush()


def escape_what_cannot_be_shown() -> None:
    """Have standard output escape a character that it cannot write, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(message: str) -> None:
    """Print one line on standard error. A closed one is no reason for anything else to fail."""
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
