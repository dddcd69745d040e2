"""
The file of a ticket: its user alone may read it, one command at a time uses it, and a killed command leaves it whole.

A command writes the ticket before it asks the store for what the ticket stands for. So the next command finds out what
became of a request whose answer was not heard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fencing_sdk._lease_ticket import PREFIX, LeaseTicket
from fencing_sdk.cli._streams import Exit, say
from fencing_sdk.errors import ConfigurationError, shown

_BUSY = 5.0
"""Seconds to wait for another command that uses the ticket: most need less than one."""
_POLL = 0.02


class TicketFileError(Exception):
    """Another command uses the ticket, or its file cannot be written and is as it was before."""

    def __init__(self, problem: str, code: Exit) -> None:
        super().__init__(problem)
        self.code = code
        """The exit code of a command that has to end because of it."""


class TicketFile:
    """A file with one ticket, which need not exist yet."""

    def __init__(self, name: str) -> None:
        if PREFIX in name:
            msg = "--ticket takes the name of a file, not a ticket: the process list shows it to every user"
            raise ConfigurationError(msg)
        self.path = Path(name)
        try:
            regular = stat.S_ISREG(self.path.stat().st_mode)
        except OSError as error:
            regular = error.errno in {errno.ENOENT, errno.ENOTDIR}  # what is missing is made, or found to be impossible
        if not regular:
            msg = f"--ticket {shown(name)} is not a regular file"
            raise ConfigurationError(msg)
        self._draft = self.path.with_name(f".{self.path.name}.draft")
        self._door = self.path.with_name(f"{self.path.name}.lock")

    @contextlib.contextmanager
    def alone(self, wait: float | None = 0.0) -> Iterator[None]:
        """
        Keep other commands from the ticket, after a *wait* for one that uses it: a moment at least, None for ever.

        Raises:
            TicketFileError: it still uses the ticket, or no file can be made beside it.
        """
        end = None if wait is None else time.monotonic() + max(wait, _BUSY)
        while (door := self._enter()) is None:
            if end is not None and time.monotonic() > end:
                msg = f"another fencing command uses the ticket in {shown(str(self.path))}"
                raise TicketFileError(msg, Exit.TAKEN)
            time.sleep(_POLL)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)
                if not self.path.exists():
                    self._door.unlink()
            os.close(door)

    def _enter(self) -> int | None:
        with self._writing():
            door = os.open(self._door, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(door), self._door.stat()):  # else it was removed meanwhile, with its ticket
                return door
        os.close(door)
        return None

    def read(self) -> LeaseTicket | None:
        """
        Return the ticket, or None if there is no file. Print a warning if other users may read it.

        Raises:
            ConfigurationError: it cannot be read, or has no ticket. No part of it is repeated.
        """
        where = f"the ticket in {shown(str(self.path))}"
        try:
            with self.path.open("rb") as file:
                mode, content = os.fstat(file.fileno()).st_mode, file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            msg = f"{where} cannot be read: {error.strerror}"
            raise ConfigurationError(msg) from error
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            say(f"{where} is a secret that other users may read; run: chmod 600 FILE")
        try:
            return LeaseTicket.load(content.decode("ascii", "replace"))
        except ConfigurationError as error:
            msg = f"{where} cannot be used: {error}. To take the lock anew, remove the file"
            raise ConfigurationError(msg) from None

    def write(self, ticket: LeaseTicket) -> None:
        """Replace the file by *ticket*, durably and as a whole. Raises `TicketFileError`."""
        self.draft(ticket)
        self.publish()

    def draft(self, ticket: LeaseTicket) -> None:
        """Write *ticket* beside the file, durably. Raises `TicketFileError`."""
        with self._writing():
            self._draft.unlink(missing_ok=True)  # left behind by a command that was killed
            with os.fdopen(os.open(self._draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(f"{ticket.dump()}\n")
                file.flush()
                os.fsync(file.fileno())

    def publish(self) -> None:
        """Replace the file by the draft, which takes no space on a disk. Raises `TicketFileError`."""
        with self._writing():
            self._draft.replace(self.path)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"the ticket cannot be written to {shown(str(self.path))}: {error.strerror}"
            raise TicketFileError(msg, Exit.OUTPUT) from error
