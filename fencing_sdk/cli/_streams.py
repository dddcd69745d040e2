"""Standard output and standard error of the commands, also where the other end is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn, TextIO

from rich.console import Console


class OutputClosedError(Exception):
    """The reader of standard output has gone, as ``head`` does after its tenth line."""


class Output(Console):
    """A console on standard output; a closed pipe is an error and not, as by default, exit code 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Tell that the reader has gone."""
        raise OutputClosedError


def write_out(text: str) -> None:
    """
    Write *text* to standard output, as it is.

    Raises:
        OutputClosedError: its reader has gone.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosedError from None


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
