"""What ``fencing run`` was told to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from fencing_sdk._values.holder_facts import harmless
from fencing_sdk.recipes.jobs import AtLeastOn

OnLoss = Literal["term", "kill", "warn"]


@dataclass(frozen=True, slots=True)
class Job:
    """A command, what to do when its lease is lost, and how much to say about it."""

    command: Sequence[str]
    on_loss: OnLoss
    at_least: float = 0.0
    """Seconds from the grant for which the lock stays taken, although the command has ended."""
    at_least_on: AtLeastOn = "success"
    pass_url: bool = False
    """Whether the command may know the store of its lock."""
    quiet: bool = False
    verbose: bool = False

    @property
    def program(self) -> str:
        """The command's name alone: its folder is long, and its arguments may hold passwords."""
        return harmless(PurePath(self.command[0]).name or self.command[0])
