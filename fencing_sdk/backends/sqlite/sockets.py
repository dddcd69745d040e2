"""
Ringing in another process: one datagram for each ticket that has begun to hold, or was ended.

Each backend object has one socket, read by its event loop, from its first ticket on. The process that frees a lock
sends the message after it has committed the transaction. If a datagram is lost, the turn is not: every waiter also
keeps its ticket.

The sockets live in Linux's abstract namespace: there is no path to choose, and nothing is left on the disk after a
kill. They are visible within one network namespace only. A waiter in another one relies on its keeps, and so does a
waiter on a system without such sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from fencing_sdk._values.loop_owner import LoopOwner

_PREFIX = b"\0fencing-sdk/"
_LONGEST = 1024
"""Bytes of a datagram that are read; an operator's reason has up to 800."""
_AT_ONCE = 64
"""Datagrams that are read before the loop gets its turn: every user of the machine may send them."""


class BellSocket:
    """
    A socket that passes on the texts that it receives.

    Args:
        on_message: Called in the running loop with the text of each datagram, which may come from any process.
    """

    def __init__(self, on_message: Callable[[str], object]) -> None:
        self.name = os.urandom(16).hex()
        self._on_message = on_message
        self._owner = LoopOwner()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.settimeout(0.0)
            self._socket.bind(_PREFIX + self.name.encode())
            self._owner.loop.add_reader(self._socket.fileno(), self._read)
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_current(self) -> bool:
        """True if the loop that runs here reads it: not that of an earlier client, or of the parent of a fork."""
        return self._owner.is_current

    def close(self) -> None:
        """Close the socket. A forked child closes only its copy: the registration belongs to the parent's loop."""
        if self._owner.in_this_process:
            self._owner.loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                datagram = self._socket.recv(_LONGEST)
            except OSError:
                return
            self._on_message(datagram.decode(errors="replace"))


def open_bell_socket(on_message: Callable[[str], object]) -> BellSocket | None:
    """Make a socket for the running loop; None where the system or the loop has no such sockets."""
    if sys.platform != "linux":
        return None
    try:
        return BellSocket(on_message)
    except (OSError, NotImplementedError):
        return None


def send_datagram(name: str, text: str) -> bool:
    """Send *text* to the socket called *name*. False when it is gone; if its buffer is full, the text is lost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0.0)
        try:
            sender.sendto(text.encode(), _PREFIX + name.encode())
        except ConnectionRefusedError:
            return False
        except OSError:  # its buffer is full, so it is there
            return True
    return True
