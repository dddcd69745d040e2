"""
Events as JSON lines: one object a line, to be judged or searched later.

``t`` is the machine's boot clock, so recordings of several processes of one machine can be put on
one axis. A line is written by one call to a file opened for appending, so that processes may share it.
A new file is readable by its owner alone: lock names may reveal more than they should.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fencing_sdk._values.clock import BootClock, Clock
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Event


class Recorder:
    """
    An observer that appends every event to a file.

    Args:
        path: The file, such as ``run.jsonl``. It is created, and appended to.

        actor: Who is recording, shown as a lane of its own. The process id by default.

        clock: Read by `record` for ``t``, in seconds. Events bring their own.

    Raises:
        ConfigurationError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, actor: str | None = None, clock: Clock | None = None) -> None:
        self._actor = actor
        self._clock = BootClock() if clock is None else clock
        try:
            self._file = open(os.fspath(path), "ab", buffering=0, opener=_private)  # noqa: SIM115  (kept open for the life of the recorder)
        except (OSError, TypeError, ValueError) as error:
            msg = f"cannot record to {shown(path)}: {getattr(error, 'strerror', None) or error}"
            raise ConfigurationError(msg) from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def __call__(self, event: Event) -> None:
        """Record *event*; this is what makes a recorder an observer."""
        fields = event.as_dict()
        kind = str(fields.pop("kind"))
        at = fields.pop("at")
        self._write({"t": at, "kind": kind, "actor": self._lane(), **fields})

    def record(self, kind: str, **fields: object) -> None:
        """
        Record something of the caller's own, such as a write and what became of it.

        Raises:
            ValueError: a field is NaN or infinite, which JSON cannot say; or the recorder is closed.
        """
        self._write({"t": self._clock.now(), "kind": kind, "actor": self._lane(), **fields})

    def _lane(self) -> str:
        return str(os.getpid()) if self._actor is None else self._actor  # not kept: this may be a fork by now

    def _write(self, line: dict[str, object]) -> None:
        text = json.dumps(line, default=str, allow_nan=False)
        self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent; a recorder that is garbage-collected closes itself."""
        self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
