"""Ports of this machine for servers and proxies of tests, which no other test process takes at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path

HOST = "127.0.0.1"
PORTS = range(11_000, 21_000)
"""With the bus of a Redis cluster 10,000 above, and all of it below the ports that the kernel gives to clients."""

REMEMBERED = 400
"""How many of its latest ports a process keeps for itself: more than any test has servers."""

_choice = random.SystemRandom()


class Reservations:
    """
    The ports that this process has handed out, locked against every other process that runs these tests.

    A server that a test has killed does not listen, so its port looks free to others until it starts again. Each port
    is one byte of a file that all test processes share, and the lock on that byte ends with its process at the latest.
    """

    def __init__(self, path: Path) -> None:
        # One descriptor for all of them: closing any other one of this file would give up every lock.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._ports: deque[int] = deque()

    def take(self, port: int) -> bool:
        """Reserve *port*; False if this process or another one has it."""
        if port in self._ports:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        self._ports.append(port)
        while len(self._ports) > REMEMBERED:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._ports.popleft())
        return True

    def close(self) -> None:
        """Give all of them back."""
        os.close(self._file)


_reservations = Reservations(Path(tempfile.gettempdir()) / f"fencing-sdk-test-ports-{getpass.getuser()}")


def free_port() -> int:
    """A port that nothing listens on and that no other test is given for as long as this one may need it."""
    for _ in range(200):
        port = _choice.choice(PORTS)
        if _reservations.take(port) and _unused(port) and _unused(port + 10_000):
            return port
    raise AssertionError("no free port")


def _unused(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((HOST, port))
        return True
    return False
