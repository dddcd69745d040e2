"""
Locks within one process and one event loop: the reference backend, for tests and single-process services.

Tokens: hybrid by default (see `token_source`), so they keep growing when the process restarts.
Clock: the process's own. Waiters: first come, first served, woken directly.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from fencing_sdk._values.answer import Settled
from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import BootClock, Clock, wall_ticks
from fencing_sdk._values.loop_owner import OneLoop, Uncopied
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import ALL_MODES, Bell, Kept, News
from fencing_sdk.abc.line import Line, TokenSource
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.tokens import token_source
from fencing_sdk.errors import ConfigurationError

_SWEEP_ABOVE = 64


class MemoryLines:
    """
    Lines of tickets in this process.

    Args:
        clock: By which tickets die.

        next_token: From the last token of any name to the next one. One counter serves all names, so that a name
            without tickets can be forgotten.

        ring: Called with the owner of a ticket and the news of its bell.
    """

    def __init__(self, clock: Clock, next_token: TokenSource, ring: Callable[[str, News], object]) -> None:
        self.clock = clock
        self._next_token = next_token
        self._ring = ring
        self._lines: dict[str, Line] = {}
        self._last = 0
        self._sweep_at = _SWEEP_ABOVE

    def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`, as for the others."""
        line = self._line(claim.name)
        place = line.draw(claim, self.clock.now(), only_if_it_holds=only_if_it_holds)
        self._leave(claim.name, line, claim.owner)
        return place

    def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        """See `draw`."""
        places: list[Place | Gone] = []
        now = self.clock.now()
        for claim, number in tickets:
            line = self._line(claim.name)
            places.append(line.keep(claim, now, number))
            self._leave(claim.name, line, claim.owner)
        return places

    def give_back(self, claim: Claim, after: float = 0.0) -> Gone | None:
        """See `draw`."""
        line = self._line(claim.name)
        gone = line.give_back(claim.owner, self.clock.now(), after)
        self._leave(claim.name, line, claim.owner)
        return gone

    def pass_on(self, claim: Claim, heir: Claim) -> Place | Gone:
        """See `draw`."""
        line = self._line(claim.name)
        place = line.pass_on(claim.owner, heir, self.clock.now())
        self._leave(claim.name, line, heir.owner)
        return place

    def end(self, name: str, token: int, reason: str) -> bool:
        """See `draw`."""
        line = self._line(name)
        over = line.end(token, reason, self.clock.now())
        self._leave(name, line)
        for row in over:
            self._ring(row.owner, Gone(reason))
        return bool(over)

    def tickets(self, name: str) -> Sequence[Seen]:
        """See `draw`."""
        line = self._line(name)
        seen = line.seen(self.clock.now())
        self._leave(name, line)
        return seen

    def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `draw`."""
        after = (name for name in self._lines if name.startswith(prefix) and (cursor is None or name > cursor))
        page = heapq.nsmallest(limit, after)
        return page, page[-1] if len(page) == limit else None

    def _line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= self._sweep_at:
                self._sweep()
            line = self._lines[name] = Line(self._draw_token, drawn=self._last)
        return line

    def _leave(self, name: str, line: Line, asked_by: str | None = None) -> None:
        """Ring for the tickets that have begun to hold, but not for the caller's, and forget a line without tickets."""
        if line.rung:
            for row in line.rung:
                if row.owner != asked_by:
                    self._ring(row.owner, Place(row.token, row.permit, row.number))
            line.rung.clear()
        if not line.rows and not line.ended:
            del self._lines[name]

    def _draw_token(self, _: int) -> int:
        self._last = self._next_token(self._last)
        return self._last

    def _sweep(self) -> None:
        now = self.clock.now()
        self._lines = {name: line for name, line in self._lines.items() if line.seen(now) or line.ended}
        self._sweep_at = 2 * len(self._lines) + _SWEEP_ABOVE


class MemoryBackend(Uncopied):
    """
    A lock service in this process.

    Share one object between clients of one event loop that are to exclude each other; its lines stay when they close.

    Args:
        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with the process.
    """

    modes = ALL_MODES
    rings = True

    def __init__(self, *, tokens: str = "hybrid") -> None:
        self._hybrid = tokens != "counter"
        self._lines = MemoryLines(BootClock(), token_source(tokens, wall_ticks), self._ring)
        self._bells: dict[str, Bell] = {}  # by owner
        self._loop = OneLoop()

    def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Settled[Place | Busy]:
        """See `fencing_sdk.abc.Backend.draw`."""
        self._loop.check(self)
        return Settled(self._lines.draw(claim, only_if_it_holds=only_if_it_holds))

    def keep(self, tickets: Sequence[Kept]) -> Settled[Sequence[Place | Gone]]:
        """See `fencing_sdk.abc.Backend.keep`."""
        self._loop.check(self)
        return Settled(self._lines.keep(tickets))

    def give_back(self, claim: Claim, *, after: float = 0.0) -> Settled[Gone | None]:
        """See `fencing_sdk.abc.Backend.give_back`."""
        self._loop.check(self)
        return Settled(self._lines.give_back(claim, after))

    def pass_on(self, claim: Claim, heir: Claim) -> Settled[Place | Gone]:
        """See `fencing_sdk.abc.PassesOn.pass_on`."""
        self._loop.check(self)
        return Settled(self._lines.pass_on(claim, heir))

    def end(self, name: str, token: int, reason: str) -> Settled[bool]:
        """See `fencing_sdk.abc.Backend.end`."""
        self._loop.check(self)
        return Settled(self._lines.end(name, token, reason))

    def tickets(self, names: Sequence[str]) -> Settled[Sequence[Sequence[Seen]]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        self._loop.check(self)
        return Settled([self._lines.tickets(name) for name in names])

    def names(self, prefix: str, cursor: str | None, limit: int) -> Settled[tuple[Sequence[str], str | None]]:
        """See `fencing_sdk.abc.Backend.names`."""
        self._loop.check(self)
        return Settled(self._lines.names(prefix, cursor, limit))

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        self._bells[claim.owner] = bell
        return partial(self._bells.pop, claim.owner, None)

    def take_away(self, name: str) -> None:
        """Take the lock away from all who hold it, for tests: they lose their leases with `LossReason.REVOKED`."""
        for seen in self._lines.tickets(name):
            if seen.token is not None:
                self._lines.end(name, seen.token, "")

    async def aclose(self) -> None:
        """Nothing is open; the tickets stay for the other clients of this object, which may be in the next loop."""
        self._loop.forget()

    def _ring(self, owner: str, news: News) -> None:
        """
        Ring in a later turn of the loop.

        From Python 3.12 on this may run inside a step of the holder's own task, and 3.12 keeps a cancellation that is
        made there although the block has taken it back.
        """
        if (bell := self._bells.get(owner)) is not None:
            asyncio.get_running_loop().call_soon(bell, news, context=Context())


def from_url(url: str, **options: object) -> MemoryBackend:
    """
    Make a backend for ``memory://``; `MemoryBackend` explains the options.

    Raises:
        ConfigurationError: the URL has a path, or an option is unknown.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(MemoryBackend))
    if url.partition("://")[2].partition("?")[0]:
        msg = "memory:// takes no path; pass one MemoryBackend object to every client that shares it"
        raise ConfigurationError(msg)
    return MemoryBackend(**chosen)
