"""
A command that is supervised: a process group of its own, its signals, and the terminal it may ask for.

The group makes it possible to signal the command with what it started, and keeps Ctrl-C from
reaching it twice. The price is that the group is not the terminal's foreground group: a command
that reads from the terminal is stopped by the kernel. Only then does it get the terminal, so that a pipeline around the
supervisor keeps working.

What the command has started belongs to it, as Linux shows it in ``/proc``, whatever group and session it has:
``timeout 600 step`` makes a group. What has lost its parent is known by ``FENCING_AROUND`` in its environment. If it is
in another session, too, it was detached on purpose, as a daemon is: such a process is named, and runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio

from fencing_sdk._values.drivers import packed_text
from fencing_sdk._values.token import ENV_AROUND

TO_THE_GROUP = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that mean the work as a whole."""
TO_THE_COMMAND = ("SIGUSR1", "SIGUSR2", "SIGWINCH")
"""Signals that mean something to the command alone; what it started might die of them."""

SEEN = sys.platform.startswith("linux")
"""True if this system shows what a command has started, beyond its process group."""
_POLL = 0.05
_INIT = 1
_SIGNALLED = 128


class Child:
    """
    A running command, which gets *death_signal* if this process dies first, or nothing for 0.

    *may_go_on* is asked before the command is continued after a stop from the terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        self._may_go_on = may_go_on
        self.suspended = False
        """True if this process stopped itself together with the command."""
        self._ended = asyncio.Event()
        self._code: int | None = None
        self._pid = 0  # until it is started
        self._children = 0  # the one, or -1 for all
        # Blocked by who has started us, it would never be heard that the command has ended or was stopped.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP})
        script = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            packed_text(__package__, "_exec.py"),
            str(os.getpid()),
            str(death_signal),
        ]
        # The handlers come before the start: a stop of this process alone would let the command run on.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look)
        loop.add_signal_handler(signal.SIGCONT, self.go_on)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGTSTP, self._signal_group, signal.SIGTSTP)
        self._pid = os.posix_spawn(
            *(sys.executable, [*script, *command], environment),
            setpgroup=0,
            setsigdef=(signal.SIGPIPE,),
            setsigmask=before,
        )
        self._children = -1 if os.getpid() == _INIT else self._pid
        self._offspring = Offspring(self._pid, environment)

    @property
    def running(self) -> bool:
        """True if the command itself was started and has not ended; what it left behind does not count."""
        return self._pid != 0 and self._code is None

    @property
    def code(self) -> int:
        """The exit code of a command that has ended: its own, or 128 + n after death by signal n."""
        assert self._code is not None
        return self._code

    async def wait(self) -> None:
        """Wait for the end of the command."""
        await self._ended.wait()

    def forward(self, number: int) -> None:
        """Pass a signal on that this process got."""
        if not self.running:
            return
        if signal.Signals(number).name in TO_THE_GROUP:
            self._signal_group(number)
        else:
            os.kill(self._pid, number)

    async def stop(self, grace: float) -> None:
        """
        Stop the whole group and what has left it: SIGTERM, and after *grace* seconds SIGKILL.

        Without grace, SIGKILL at once.
        """
        if grace > 0:
            self._signal_all(signal.SIGTERM)
            self._signal_all(signal.SIGCONT)  # a stopped process does not hear SIGTERM
            with anyio.move_on_after(grace):
                while self._group_lives() or self._offspring.beyond_its_group():  # noqa: ASYNC110  (has no signal)
                    await anyio.sleep(_POLL)
        while self._signal_all(signal.SIGKILL):  # noqa: ASYNC110  (likewise)
            await anyio.sleep(_POLL)  # what they started while they were looked for
        await self._ended.wait()

    @property
    def detached(self) -> list[int]:
        """The process ids of what the command has detached from itself, and what so runs on after a `stop`."""
        return self._offspring.detached()

    def _signal_all(self, number: int) -> bool:
        self._offspring.beyond_its_group()  # found while their parents live
        self._signal_group(number)
        return self._offspring.signal(number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pid != 0:
                os.killpg(self._pid, number)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _look(self) -> None:
        """
        See whether the command has ended or was stopped; called whenever a child changed its state.

        The first process of a container is the parent of all that lost theirs, and looks at each that has ended.
        """
        while self._children:
            try:
                pid, status = os.waitpid(self._children, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._see(status)

    def _see(self, status: int) -> None:
        if os.WIFSTOPPED(status):
            self._on_stop(os.WSTOPSIG(status))
            return
        code = os.waitstatus_to_exitcode(status)
        self._code = code if code >= 0 else _SIGNALLED - code
        _move_terminal(self._pid, os.getpgrp())
        self._ended.set()

    def _on_stop(self, number: int) -> None:
        wants_terminal = number in {signal.SIGTTIN, signal.SIGTTOU}
        if wants_terminal and _move_terminal(os.getpgrp(), self._pid):
            self._signal_group(signal.SIGCONT)
        elif wants_terminal or number == signal.SIGTSTP:
            self._suspend(whole_job=_move_terminal(self._pid, os.getpgrp()) or wants_terminal)

    def _suspend(self, *, whole_job: bool) -> None:
        """Stop like the command, so that the shell takes over; `go_on` is next."""
        self.suspended = True
        if whole_job:  # the terminal stopped the command's group alone, and the shell waits for ours
            os.killpg(0, signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue a command that was suspended with this process, if it still may."""
        if self.suspended and self.running and self._may_go_on():
            self._signal_group(signal.SIGCONT)
        self.suspended = False


def _move_terminal(owner: int, to: int) -> bool:
    """Give the terminal from one process group to another; False if it is not *owner*'s to give."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        if os.tcgetpgrp(terminal) != owner:
            return False
        with _not_stopped_by_terminal():
            os.tcsetpgrp(terminal, to)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _not_stopped_by_terminal() -> Iterator[None]:
    """Block the signal by which the kernel stops a background process that changes its terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RunningProcess(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    group: int
    session: int
    began: int
    """In ticks since the machine began: a process id may be used again."""


class Offspring:
    """Processes that a *command* has started, by its process id, which is also that of its group."""

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
        """Return whether a process was started under the command; False also where that is not ours to read."""
        try:
            return self._mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _running() -> list[RunningProcess]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat") if SEEN else ():
        with contextlib.suppress(OSError):
            fields = entry.read_bytes().rpartition(b")")[2].split()
            if fields[0] not in {b"Z", b"X"}:
                parent, group, session, began = (int(fields[place]) for place in (1, 2, 3, 19))
                found.append(RunningProcess(int(entry.parent.name), parent, group, session, began))
    return found
