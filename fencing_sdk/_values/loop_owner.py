"""
Which event loop, of which process, something belongs to: a connection, a socket, a pool, a lease.

An object of a backend lives on when its loop is closed and the next one is opened, and a forked child
inherits it. What was opened in the earlier loop is of no use in the next one, and what the parent opened
must not even be closed by the child: they share the socket.
"""

from __future__ import annotations

import asyncio
import os
from typing import NoReturn
from weakref import WeakKeyDictionary

from fencing_sdk.errors import UsageError


def loop_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def running_loop() -> asyncio.AbstractEventLoop:
    """
    Return the running event loop.

    Raises:
        UsageError: none runs in this thread. Under trio and curio none does.
    """
    loop = loop_here()
    if loop is None:
        msg = (
            "no asyncio event loop runs here, and fencing_sdk needs one: it works on asyncio and uvloop, not on trio "
            'or curio (with anyio: backend="asyncio"); from a thread use asyncio.run_coroutine_threadsafe'
        )
        raise UsageError(msg)
    return loop


def no_task() -> UsageError:
    """Return the error for a coroutine that runs outside any task, where nothing could be cancelled."""
    msg = (
        "no asyncio task runs here, and fencing_sdk needs one, as asyncio.timeout() does: let a task run the coroutine "
        "(asyncio.create_task); on Python 3.14 and later nest_asyncio hides every task, and nest_asyncio2 does not"
    )
    return UsageError(msg)


class LoopOwner:
    """The event loop and the process that made this object."""

    __slots__ = ("_pid", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """True if the running loop of this process is the owner: only then what it owns may be used."""
        return self._pid == os.getpid() and self.loop is asyncio.get_running_loop()

    @property
    def in_this_process(self) -> bool:
        """True if this process is the owner's. If not, a parent owns it: leave it alone, do not even close it."""
        return self._pid == os.getpid()


class OneLoop:
    """
    Refuses an object to a second event loop while the first one uses it, and runs.

    Tables and connections of a backend have no lock for threads: grants got lost, and waiters were woken late.
    """

    __slots__ = ("_owner", "_users")

    def __init__(self) -> None:
        self._owner: LoopOwner | None = None
        self._users = 0

    def check(self, what: object) -> asyncio.AbstractEventLoop:
        """
        Take note of the loop that uses *what* now, and return it.

        Raises:
            UsageError: another loop uses it, and runs.
        """
        owner, loop = self._owner, asyncio.get_running_loop()
        if owner is not None and owner.loop is loop:  # a child of a fork has a loop of its own
            return loop
        if owner is not None and owner.in_this_process and owner.loop.is_running():
            msg = (
                f"this {type(what).__name__} is in use in another event loop, and a backend serves one loop at a time; "
                "make another one for this loop, or let all threads share one client of fencing_sdk.sync"
            )
            raise UsageError(msg)
        self._owner, self._users = LoopOwner(), 0
        return loop

    def enter(self, what: object) -> LoopOwner | None:
        """`check` for a user that passes the answer to `leave`."""
        self.check(what)
        self._users += 1
        return self._owner

    def leave(self, owner: LoopOwner | None) -> None:
        """Note that a user has gone. After the last one another loop may follow."""
        if owner is self._owner:
            self._users -= 1
            if not self._users:
                self._owner = None

    def forget(self) -> None:
        """Another loop may follow."""
        self._owner = None


_loops: WeakKeyDictionary[object, OneLoop] = WeakKeyDictionary()


def loop_of(backend: object) -> OneLoop:
    """Return what knows the loop whose clients use *backend*: the same for every client of one object."""
    try:
        return _loops.setdefault(backend, OneLoop())
    except TypeError:  # it has no weak references, or no hash
        return OneLoop()


class ForkDetector:
    """Shows a forked child, once, that what it has inherited belongs to its parent."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def forked(self) -> bool:
        """Return whether the process was forked since the last call."""
        if self._pid == os.getpid():
            return False
        self._pid = os.getpid()
        return True


class Uncopied:
    """
    The base of what is neither copied nor pickled.

    A twin of a client would close the first one when it is dropped, that of a lease would release its lock, and a
    pickled client, backend or guard would carry the password of its store.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """
        Refuse `copy` and `pickle`, which both ask here.

        Raises:
            UsageError: always.
        """
        msg = (
            f"{type(self).__name__} cannot be copied or pickled, because it belongs to this process; share the object "
            "itself between tasks or threads, and let another process make its own: it needs the URL, the name "
            "of the lock, or the token"
        )
        raise UsageError(msg)
