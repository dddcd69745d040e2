"""
Waking a waiter in another process: one datagram to the head of the line, and no polling.

Each backend object that has waiters has one socket, read by its event loop. The process that frees a lock sends the
ticket of the waiter whose turn it is, after it has committed the transaction. If a datagram is lost, the turn is not:
every waiter also tries again by its own timer. Holders hear of revocations in the same way (`losses`).

The sockets live in Linux's abstract namespace: there is no path to choose, and nothing is left on the disk after a
kill. They are visible within one network namespace only. A waiter in another one relies on its timer, and so does a
waiter on a system without such sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fencing_sdk._values.loop_owner import LoopOwner

_PREFIX = b"\0fencing-sdk/"
_LONGEST = 64
"""Bytes of a datagram that are read; a ticket has 32, the digest of a name 64."""
_AT_ONCE = 64
"""Datagrams that are read before the loop gets its turn: every user of the machine may send them."""


def new_ticket() -> str:
    """A text that no other process can guess."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True)
class WakeupAddress:
    """How other processes reach a waiter, and how they know that it lives."""

    socket: str
    """The name of its wake-up socket, or "" for none."""
    group: str = field(default_factory=new_ticket)
    """The waiters of one backend object and loop, which give their signs of life together."""
    ticket: str = field(default_factory=new_ticket)
    """The text of the datagram that wakes it."""


class WakeupSocket:
    """
    A socket that passes on the texts that it receives.

    Args:
        on_ticket: Called in the running loop with the text of each datagram, which may come from any process.
    """

    def __init__(self, on_ticket: Callable[[str], object]) -> None:
        self.name = new_ticket()
        self._on_ticket = on_ticket
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
    def of_this_process(self) -> bool:
        """Whether this process opened it, and not the parent of this forked child."""
        return self._owner.in_this_process

    def close(self) -> None:
        """Close the socket. A forked child closes only its copy: the registration belongs to the parent's loop."""
        if self.of_this_process:
            self._owner.loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                datagram = self._socket.recv(_LONGEST)
            except OSError:
                return
            self._on_ticket(datagram.decode("ascii", "replace"))


def open_wakeup_socket(on_ticket: Callable[[str], object]) -> WakeupSocket | None:
    """Make a socket for the running loop; None where the system or the loop has no such sockets."""
    if sys.platform != "linux":
        return None
    try:
        return WakeupSocket(on_ticket)
    except (OSError, NotImplementedError):
        return None


def send_wakeup(address: WakeupAddress) -> bool:
    """Wake the waiter at *address*. False when its socket is gone, and the waiter with it."""
    return not address.socket or send_datagram(address.socket, address.ticket)


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


def network_identity() -> str:
    """Name the network namespace, within which the sockets can be reached."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return "unknown"
