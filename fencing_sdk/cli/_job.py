"""What ``fencing run`` was told to run, and what others may know about it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

from fencing_sdk._values.clock import wall_seconds
from fencing_sdk.recipes.jobs import AtLeastOn

OnLoss = Literal["term", "kill", "warn"]

_SHOWN = 100
"""Characters of a name; two of them, with every one escaped, stay far below what a store keeps."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command, what to do when its lease is lost, and how much to say about it."""

    command: Sequence[str]
    on_loss: OnLoss
    at_least: float = 0.0
    """Seconds from the grant for which the lock stays taken, although the command has ended."""
    at_least_on: AtLeastOn = "success"
    quiet: bool = False
    verbose: bool = False

    @property
    def program(self) -> str:
        """The command's name alone: its folder is long, and its arguments may hold passwords."""
        return _harmless(PurePath(self.command[0]).name or self.command[0])

    def description(self) -> str:
        """Return the default metadata: host, process id, program and start of this command."""
        start = datetime.fromtimestamp(wall_seconds(), UTC).isoformat(timespec="seconds")
        facts = {"host": _harmless(os.uname().nodename), "pid": os.getpid(), "command": self.program, "start": start}
        return json.dumps(facts, ensure_ascii=False)


def _harmless(name: str) -> str:
    """A name that every store keeps and every terminal shows, cut; an argument may be any bytes."""
    return "".join(char if char.isprintable() else "?" for char in name[:_SHOWN])
