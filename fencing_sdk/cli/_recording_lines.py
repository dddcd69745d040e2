"""The lines of a recording. They are untrusted input: one that is not an event is an error with its number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from fencing_sdk._values.claim import TOKEN_LIMIT
from fencing_sdk.errors import ConfigurationError, shown

Line = dict[str, Any]
"""One event: at least ``t`` in seconds, ``kind``, and ``actor``."""


class PlacedLine(Line):
    """An event that knows ``where`` it was read, for an error about it."""

    __slots__ = ("where",)

    def __init__(self, line: Line, where: str) -> None:
        super().__init__(line)
        self.where = where


_SHOW_EVERY = 500
"""Lines after which the progress is shown anew."""
_SECONDS_LIMIT = 2**53
"""Seconds from which on a moment is no moment any more; far below, sums and differences stay finite."""


def read_recording(paths: Sequence[Path]) -> list[Line]:
    """
    Read the lines of recordings made on one machine, in order of time. A terminal shows how far that is.

    Raises:
        ConfigurationError: a file cannot be read, or a line is not an event.
    """
    console = Console(stderr=True)
    lines: list[Line] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path in paths:
            try:
                size = path.stat().st_size
                with path.open("rb") as file:
                    task = progress.add_task(f"reading {escape(shown(path.name))}", total=size)
                    for number, raw in enumerate(file, start=1):
                        if text := raw.decode().strip():
                            lines.append(parse_line(text, f"line {number} of {shown(str(path))}"))
                        if number % _SHOW_EVERY == 0:
                            progress.update(task, completed=file.tell())
            except (OSError, UnicodeDecodeError) as error:
                msg = f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
                raise ConfigurationError(msg) from error
    lines.sort(key=lambda line: float(line["t"]))
    return lines


def parse_line(raw: str | bytes, where: str) -> Line:
    """
    Return the event that *raw* holds; *where* names it in the error.

    Raises:
        ConfigurationError: it is not an object with a finite ``t`` and a ``kind``.
    """
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # the latter: brackets in brackets in brackets
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not _is_seconds(line.get("t")):
        msg = f"{where} is not an event: expected a JSON object with 't' in seconds and 'kind'"
        raise ConfigurationError(msg)
    return PlacedLine(line, where)


def incomplete(line: Line, error: KeyError | ValueError) -> ConfigurationError:
    """The error for a *line* in which `read_seconds`, `read_token` or a look-up found a field missing or wrong."""
    field = shown(error.args[0])
    wrong = f"{field} is missing" if isinstance(error, KeyError) else f"{field} is no such number"
    where = f"{line.where}: " if isinstance(line, PlacedLine) else ""
    return ConfigurationError(f"{where}a recorded event of kind {shown(line['kind'])} is incomplete: {wrong}")


def read_seconds(line: Line, field: str) -> float:
    """
    Return a number of seconds.

    Raises:
        KeyError: *line* has no such field.
        ValueError: it is no number, or too large for a time.
    """
    if not _is_seconds(line[field]):
        raise ValueError(field)
    return float(line[field])


def read_token(line: Line, field: str) -> int:
    """
    Return a token.

    Raises:
        KeyError: *line* has no such field.
        ValueError: it is no whole number from 0 to below 2**53.
    """
    token: object = line[field]
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < TOKEN_LIMIT:
        raise ValueError(field)
    return token


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_SECONDS_LIMIT < value < _SECONDS_LIMIT
