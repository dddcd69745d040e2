"""
The opening of a client by its thread, for which another thread waits.

It has one of three ends, and the first one counts: the client is open, the opening has failed, or it was given up. The
handler of a signal may run anywhere in the thread that waits, and give the opening up. So no lock is waited for here
but the one that ends the wait: a `Future` would be held by the very frame that the handler has interrupted.
"""

from __future__ import annotations

import threading

_NAP = 0.2
"""Seconds after which the wait is begun anew: a signal that came right before a sleep does not end it."""


class Opening:
    """One opening, and how it ended."""

    def __init__(self) -> None:
        self._settled, self._woken = threading.Lock(), threading.Lock()
        self._woken.acquire()
        self.error: BaseException | None = None
        """Why it has failed."""
        self.given_up = False

    def succeed(self) -> bool:
        """Tell that the client is open. False: the opening was given up, so close it again."""
        return self._end()

    def fail(self, error: BaseException) -> bool:
        """Tell that the opening has failed. False: it had ended before."""
        return self._end(error=error)

    def give_up(self) -> bool:
        """Expect nothing of the opening any more. False: it has ended already."""
        return self._end(given_up=True)

    def wait(self) -> None:
        """Wait for the end."""
        while not self._woken.acquire(timeout=_NAP):
            pass

    def _end(self, *, error: BaseException | None = None, given_up: bool = False) -> bool:
        if not self._settled.acquire(blocking=False):
            return False
        self.error, self.given_up = error, given_up
        self._woken.release()
        return True
