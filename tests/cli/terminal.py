"""A terminal with a keyboard, for commands that behave differently there."""

import codecs
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from command_line import PATIENCE, Fencing

LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "fencing_sdk", *sys.argv[1:]])
"""


class Terminal:
    """A supervisor as the leader of a session with a terminal, and a keyboard."""

    def __init__(self, fencing: Fencing, *arguments: str) -> None:
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end in the middle of a character
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAD, *arguments],
            cwd=fencing.folder,
            env=fencing.environment,
            stdin=screen,
            stdout=screen,
            stderr=screen,
        )
        os.close(screen)

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def shows(self, text: str) -> None:
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            ready, _, _ = select.select([self._keyboard], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited in vain for {text!r} in {self.seen!r}"
            self.seen += self._decoder.decode(os.read(self._keyboard, 4096))

    def forget(self) -> None:
        """Look from now on only at what comes."""
        self.seen = ""

    def rest(self) -> str:
        """What was written until the end."""
        while select.select([self._keyboard], [], [], 0.2)[0]:
            try:
                self.seen += self._decoder.decode(os.read(self._keyboard, 4096))
            except OSError:  # the other end is closed
                break
        return self.seen

    def is_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


Open = Callable[..., Terminal]


@pytest.fixture
def at_a_terminal(fencing: Fencing) -> Iterator[Open]:
    opened = []

    def open_one(*arguments: str) -> Terminal:
        opened.append(Terminal(fencing, *arguments))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()
