"""
Waking a waiter in another process, and the signs of life of a waiter.

One datagram goes to the head of the line, and no waiter polls.

Each backend object that has waiters has one socket, read by its event loop. The process that frees a lock sends the
ticket of the waiter whose turn it is, after it has committed the transaction. If a datagram is lost, the turn is not:
every waiter also tries again by its own timer. Holders hear of revocations in the same way (`store`).

The sockets live in Linux's abstract namespace: there is no path to choose, and nothing is left on the disk after a
kill. They are visible within one network namespace only. A waiter in another one relies on its timer, and so does a
waiter on a system without such sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct

from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.row_backend import WaiterAddress, random_text

_PREFIX = b"\0fencing-sdk/"
_LONGEST = 64
"""Bytes of a datagram that are read; a ticket has 32, the digest of a name 64."""
_AT_ONCE = 64
"""Datagrams that are read before the loop gets its turn: every user of the machine may send them."""


class WakeupSocket:
    """
    A socket that passes on the texts that it receives.

    Args:
        on_ticket: Called in the running loop with the text of each datagram, which may come from any process.
    """

    def __init__(self, on_ticket: Callable[[str], object]) -> None:
        self.name = random_text()
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
        """True if this process opened it, and not the parent of this forked child."""
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


def send_wakeup(address: WaiterAddress) -> bool:
    """Wake the waiter at *address*. False when its socket is gone, and the waiter with it."""
    return not address.box or send_datagram(address.box, address.ticket)


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


SUFFIX = "-waiters"

_SIGN = Struct("<q")
"""Aligned and within one page, so no reader finds half of it."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class SignsOfLife:
    """
    The signs of life for one database, in a small file beside it: `locks.db-waiters`.

    Used by the thread that made it, and by no other.

    A waiter gives a sign of life every second. It need not survive a crash, so it must not cost what a transaction
    costs: the write lock, which renewals need, and sooner or later an fsync. Here it is eight bytes that the kernel
    keeps in memory and writes to the disk when it likes. Each backend object that has waiters owns a slot, which the
    database assigns; the slot holds the moment of the last sign, in microseconds of the boot clock.

    The file may vanish at any time: it is made again by the next sign. What is not in it counts as never seen.
    """

    def __init__(self, database: Path) -> None:
        self._database = Path(os.path.realpath(database))  # processes that use other links to it share the file
        self._path = self._database.with_name(self._database.name + SUFFIX)
        self._file: int | None = None

    def give(self, slot: int, now: int) -> None:
        """
        Note a sign of life for *slot*.

        Raises:
            OSError: it cannot be written.
        """
        if not self._found() and not self._open():
            self._create()
        assert self._file is not None
        os.pwrite(self._file, _SIGN.pack(now), slot * _SIGN.size)

    def seen(self, slot: int) -> int:
        """The moment of the last sign for *slot*; 0 for never."""
        if not self._found() and not self._open():
            return 0
        assert self._file is not None
        sign = os.pread(self._file, _SIGN.size, slot * _SIGN.size)
        return int(_SIGN.unpack(sign)[0]) if len(sign) == _SIGN.size else 0

    def exist(self) -> bool:
        """Return whether there is a file."""
        return self._path.exists()

    def remove(self) -> None:
        """Delete the file, because the last waiter has gone."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _found(self) -> bool:
        """Return whether the file is open, and still the one that the other processes see."""
        if self._file is None:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            found = None
        if found is not None and os.path.samestat(found, os.fstat(self._file)):
            return True
        self.close()
        return False

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, _FLAGS)
        except FileNotFoundError:
            return False
        return True

    def _create(self) -> None:
        """Make the file, for the same users as the database, as SQLite does with its own two."""
        like = self._database.stat()
        try:
            self._file = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._file = os.open(self._path, _FLAGS)
            return
        if os.geteuid() == 0:
            os.fchown(self._file, like.st_uid, like.st_gid)
        os.fchmod(self._file, like.st_mode & 0o666)
