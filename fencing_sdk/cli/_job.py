"""What ``fencing run`` was told to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from fencing_sdk._arguments import LockOptions
from fencing_sdk._client import LockClient
from fencing_sdk._lock import Lock
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
    permits: int | None = None
    """How many may hold the lock together, each with a number of its own."""
    shared: bool = False
    """Whether the lock is held together with all who share it."""
    exclusive: bool = False
    """Whether it is held alone, in one line with those who share it."""
    metrics_file: Path | None = None
    pass_url: bool = False
    """Whether the command may know the store of its lock."""
    quiet: bool = False
    verbose: bool = False

    @property
    def program(self) -> str:
        """The command's name alone: its folder is long, and its arguments may hold passwords."""
        return harmless(PurePath(self.command[0]).name or self.command[0])

    def lock(self, locks: LockClient, name: str, options: LockOptions) -> Lock:
        """
        Describe the lock that is held while the command runs.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the store has no locks that are shared.
        """
        if self.permits is not None:
            return locks.semaphore(name, permits=self.permits, **options)
        if self.shared:
            return locks.rwlock(name, **options).reader
        return locks.rwlock(name, **options).writer if self.exclusive else locks.lock(name, **options)
