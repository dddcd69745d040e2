"""
The outcomes of the runs of a lock on this machine, as a text file for the textfile collector of node_exporter.

The file is replaced as a whole, so that no half of it is ever read. What a run does not change it takes from the file
before, so the time of the last success outlives every failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum, unique
from functools import partial
from pathlib import Path

import anyio

from fencing_sdk._values.clock import wall_seconds
from fencing_sdk.cli._streams import say
from fencing_sdk.errors import ConfigurationError, shown

_SUFFIX = ".prom"
_SAMPLE = re.compile(r'(fencing_run_[a-z_]+)\{lock="(.*)"\} ([0-9]+(?:\.[0-9]+)?)')
_PATIENCE = 3.0
"""Seconds to wait for another run that writes into the same folder, which takes a thousandth: it may be frozen."""


@unique
class Result(StrEnum):
    """End of a run."""

    SUCCESS = "success"
    FAILURE = "failure"
    LOSS = "loss"
    SKIP = "skip"
    UNAVAILABLE = "unavailable"


_START, _END, _CODE = (
    f"fencing_run_{what}" for what in ("start_timestamp_seconds", "end_timestamp_seconds", "exit_code")
)
_HELP = {
    _START: "When the last command started, 0 for never.",
    _END: "When the last command ended, 0 for never. It runs while this is before its start.",
    _CODE: "The exit code of the last fencing run whose command was started and has ended.",
}


def _last(result: Result) -> str:
    return f"fencing_run_last_{result}_timestamp_seconds"


_HELP |= {
    _last(Result.SUCCESS): "When a command last ended with exit code 0 while its lock was held, 0 for never.",
    _last(Result.FAILURE): "When a command last ended with another exit code while its lock was held, 0 for never.",
    _last(Result.LOSS): "When the last run ended whose lease was lost, 0 for never.",
    _last(Result.SKIP): "When nothing was run because another holder had the lock, 0 for never.",
    _last(Result.UNAVAILABLE): "When nothing was run because the store could not be used, 0 for never.",
}


class MetricsFile:
    """The file at *path*, for the runs of *lock*. A file that cannot be written is a message and stops no run."""

    def __init__(self, path: Path, lock: str) -> None:
        if path.suffix != _SUFFIX:
            msg = f"--metrics-file must end with {_SUFFIX}, or node_exporter does not read it, got {shown(str(path))}"
            raise ConfigurationError(msg)
        self._path = path
        self._refused = ""
        """Why the file could not be written before: it is said once."""
        self._lock = lock.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")  # others may have named it

    async def started(self, at: float) -> None:
        """Note that the command has started, *at* seconds since 1970."""
        await self._note({_START: at})

    async def ended(self, result: Result, code: int, began: float, ended: float) -> None:
        """Note the end of a run. *began* and *ended* are seconds since 1970, and 0 if the command was not started."""
        run = {_START: began, _END: ended, _CODE: code} if began else {}
        await self._note({**run, _last(result): ended or wall_seconds()})

    async def _note(self, news: Mapping[str, float]) -> None:
        # In a thread, because a disk may hang: the lease is renewed meanwhile, and its loss is not waited for.
        await anyio.to_thread.run_sync(partial(self._replace, news), abandon_on_cancel=True)

    def _replace(self, news: Mapping[str, float]) -> None:
        import tempfile  # noqa: PLC0415  (few runs write a file, and this loads compressors)

        try:
            with _alone_in(self._path.parent):
                text = self._text({**self._before(), **news})
                descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
                try:
                    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                        os.fchmod(descriptor, 0o644)  # for node_exporter, which is another user
                        file.write(text)
                        file.flush()
                        os.fsync(descriptor)  # or a crash of the machine leaves an empty file
                    Path(name).replace(self._path)
                except BaseException:
                    Path(name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            if (refused := str(error.strerror)) != self._refused:
                self._refused = refused
                say(f"the metrics file {shown(str(self._path))} cannot be written: {refused}")

    def _before(self) -> Mapping[str, float]:
        """Return what the file says of this lock."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return {}
        samples = filter(None, map(_SAMPLE.fullmatch, lines))
        return {
            name: float(value) for name, lock, value in (sample.groups() for sample in samples) if lock == self._lock
        }

    def _text(self, values: Mapping[str, float]) -> str:
        return "".join(
            f'# HELP {name} {about}\n# TYPE {name} gauge\n{name}{{lock="{self._lock}"}} {values.get(name, 0):.15g}\n'
            for name, about in _HELP.items()
        )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs of this machine out while a file is read and replaced. It is not waited for them for ever."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
