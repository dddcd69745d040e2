"""
Waking a waiter in another process: one datagram to the head of the line, and no polling.

Each backend object has one socket, read by its event loop. Whoever frees a lock sends the word of
the waiter whose turn it is, after the transaction has been committed. A datagram that gets lost
costs a moment, not the turn: every waiter also tries again by its own timer.

The sockets live in Linux's abstract namespace: no path to choose, nothing left on the disk after a
kill. They are seen within one network namespace only, so a waiter in another one is left to its
timer, and so is one on a system without such sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = b"\0fencing-sdk/"
_LONGEST = 64
"""Bytes of a datagram that are looked at; a word has 32."""
_AT_ONCE = 64
"""Datagrams read before the loop gets its turn: anybody on this machine may send them."""


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where to find one who waits.

    The name of its bell, or "" for none, and the word that it waits for there; and the station that
    shows that it lives.
    """

    bell: str
    station: str = field(default_factory=lambda: os.urandom(16).hex())
    word: str = field(default_factory=lambda: os.urandom(16).hex())


class Bell:
    """A socket that calls back for each word that it expects."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.name = os.urandom(16).hex()
        self._loop = loop
        self._pid = os.getpid()
        self._expected: dict[str, Callable[[], object]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.settimeout(0.0)
            self._socket.bind(_PREFIX + self.name.encode())
            loop.add_reader(self._socket.fileno(), self._read)
        except BaseException:
            self._socket.close()
            raise

    def expect(self, word: str, wake: Callable[[], object]) -> None:
        """Call *wake* whenever *word* comes."""
        self._expected[word] = wake

    def forget(self, word: str) -> None:
        """Expect *word* no more."""
        self._expected.pop(word, None)

    def close(self) -> None:
        """Close the socket. A forked child closes only its copy: the loop's registration is the parent's."""
        if self._pid == os.getpid():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                word = self._socket.recv(_LONGEST)
            except OSError:
                return
            wake = self._expected.get(word.decode("ascii", "replace"))
            if wake is not None:
                wake()


def hang_bell() -> Bell | None:
    """Make a bell for the running loop; None where the system or the loop has no such sockets."""
    if sys.platform != "linux":
        return None
    try:
        return Bell(asyncio.get_running_loop())
    except (OSError, NotImplementedError):
        return None


def ring(place: Place) -> bool:
    """Wake the waiter at *place*. False when nobody listens there any more."""
    if not place.bell:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0.0)
        try:
            sender.sendto(place.word.encode(), _PREFIX + place.bell.encode())
        except ConnectionRefusedError:
            return False
        except OSError:  # its buffer is full, so it is there
            return True
    return True


def network_identity() -> str:
    """Name the network namespace, within which bells can be reached."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return "unknown"
