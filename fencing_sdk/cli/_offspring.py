"""
What a command has started, also in process groups of its own, as Linux shows it in ``/proc``.

A descendant of the command belongs to it, whatever group and session it has: ``timeout 600 step`` makes a group. What
has lost its parent is known by ``FENCING_AROUND`` in its environment. If it is in another session, too, it was detached
on purpose, as a daemon is: such a process is named, and runs on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fencing_sdk._values.token_wire import ENV_AROUND

SEEN = sys.platform.startswith("linux")
"""Whether this system shows what a command has started, beyond its process group."""


class RunningProcess(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    group: int
    session: int
    began: int
    """In ticks since the machine began: a process id may be used again."""


class Offspring:
    """
    What the *command* has started.

    Args:
        command: Its process id, which is also that of its process group.

        environment: What it was started with.
    """

    def __init__(self, command: int, environment: Mapping[str, str]) -> None:
        self._command = command
        self._mark = f"{ENV_AROUND}={environment.get(ENV_AROUND)}".encode()  # no other run has it; readers share tokens
        self._known: set[tuple[int, int]] = set()  # process ids and beginnings
        self._signalled: set[tuple[int, int]] = set()  # process ids and signals

    def beyond_its_group(self) -> list[int]:
        """Return the ids of what runs now and was started by the command, but is not in its process group."""
        return [process.pid for process in self._its_own(_running()) if process.group != self._command]

    def detached(self) -> list[int]:
        """Return the ids of what was started under the command and runs on because it detached itself."""
        now = _running()
        others = {one.pid for one in now} - {one.pid for one in self._its_own(now)} - {os.getpid()}
        return sorted(pid for pid in others if self._is_marked(pid))

    def signal(self, number: int) -> bool:
        """Send a signal to all beyond the process group; return whether one of them got it for the first time."""
        before = len(self._signalled)
        for pid in self.beyond_its_group():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
            self._signalled.add((pid, number))
        return len(self._signalled) > before

    def _its_own(self, now: Sequence[RunningProcess]) -> list[RunningProcess]:
        """Return what belongs to the command, and remember it: its parent may end, and its session change."""
        here, own = os.getsid(0), {self._command}
        for one in now:
            orphaned = one.session == here and one.pid != os.getpid() and self._is_marked(one.pid)
            if orphaned or (one.pid, one.began) in self._known:
                own.add(one.pid)
        while new := {one.pid for one in now if one.parent in own} - own:
            own |= new
        found = [one for one in now if one.pid in own]
        self._known.update((one.pid, one.began) for one in found)
        return found

    def _is_marked(self, pid: int) -> bool:
        """Whether a process was started under the command; False also where that is not ours to read."""
        try:
            return self._mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _running() -> list[RunningProcess]:
    """What runs on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat") if SEEN else ():
        with contextlib.suppress(OSError):
            fields = entry.read_bytes().rpartition(b")")[2].split()
            if fields[0] not in {b"Z", b"X"}:
                parent, group, session, began = (int(fields[place]) for place in (1, 2, 3, 19))
                found.append(RunningProcess(int(entry.parent.name), parent, group, session, began))
    return found
