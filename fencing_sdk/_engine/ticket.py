"""A ticket that waits, as its client knows it: what the store last answered, and when it has to be kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.claim import Claim, Gone, Place
from fencing_sdk.abc import WAITER_TTL, Kept, News

_SIGNS_OF_LIFE = 5
"""Signs of life that fit into the life of a ticket that waits."""
_LOOK_LATER = 0.02
"""Seconds after the death of a ticket ahead at which its successor looks."""
SHORTEST_PAUSE = 0.001


class Ticket:
    """
    One ticket, from its draw until it holds, and then the bell of its lease.

    A bell counts if it is about the ticket of the latest answer. Any other one says that the store has to be asked: it
    may be about a ticket of this owner that died before, and late.
    """

    __slots__ = (
        "ask_again",
        "claim",
        "counts_from",
        "due",
        "kept",
        "latest",
        "lease",
        "lives",
        "news",
        "on_bell",
        "silent_since",
        "stop",
    )  # fmt: skip  (every acquisition makes one)

    def __init__(self, claim: Claim, on_bell: Callable[[Ticket, News], object]) -> None:
        self.claim = claim
        self.on_bell = on_bell
        self.kept: Kept = claim, 0
        """Content of a `keep`: the claim, and the number of the ticket by the latest answer; 0: not known."""
        self.latest: Place | Gone | None = None
        """The latest answer about it, or what a bell has made of that."""
        self.counts_from = 0.0
        """Moment at which the request of that answer was sent, on the client's clock."""
        self.lives = 0.0
        """Seconds for which it lives from then on."""
        self.due = math.inf
        """Moment at which to keep it next."""
        self.silent_since: float | None = None
        """Moment since which the store has not answered, if it has not."""
        self.news: asyncio.Event | None = None
        """Set when there is an answer or a bell, for who waits for it."""
        self.lease: LeaseState | None = None
        """The lease that came of it."""
        self.stop: Callable[[], object] | None = None
        """Stops its bell."""
        self.ask_again = False
        """True if a bell came that the answer on its way may not know of."""

    def bell(self, news: News) -> None:
        """Ring: see `fencing_sdk.abc.Bell`."""
        self.on_bell(self, news)

    @property
    def every(self) -> float:
        """Seconds between its signs of life."""
        return min(self.claim.ttl, WAITER_TTL) / _SIGNS_OF_LIFE

    def take(self, answer: Place | Gone, sent_at: float) -> None:
        """Take the answer of a request that was sent then."""
        self.latest, self.counts_from, self.lives, self.silent_since = answer, sent_at, self.claim.ttl, None
        if isinstance(answer, Place):
            self.kept = self.claim, answer.number
            if answer.token is None:
                self.lives = min(self.lives, WAITER_TTL)
        if self.news is not None:
            self.news.set()

    def take_silence(self, sent_at: float) -> None:
        """Take it that a request which was sent then has no answer."""
        self.silent_since = sent_at if self.silent_since is None else self.silent_since
        if self.news is not None:
            self.news.set()

    def plan(self, now: float) -> None:
        """
        Say when to keep it next.

        The signs of life of all tickets fall on the same moments, two in each span, so that one request has many.
        """
        every, latest = self.every, self.latest
        if self.ask_again:
            self.due, self.ask_again = now, False
        elif self.silent_since is not None:
            self.due = now + every / 4
        else:
            look_after = latest.look_after if isinstance(latest, Place) else math.inf
            beat = every / 2
            self.due = min(
                math.floor((now + every) / beat + 1e-6) * beat, now + max(look_after + _LOOK_LATER, SHORTEST_PAUSE)
            )

    def ring(self, news: News) -> bool:
        """Take a bell; return whether the store has to be asked what it means."""
        latest = self.latest
        if isinstance(news, Place) and isinstance(latest, Place) and 0 < news.number == latest.number:
            if news.token is not None and latest.token is None:
                self.latest = news
                if self.news is not None:
                    self.news.set()
            return False
        return True

    def close(self) -> None:
        """Hear no more bells."""
        stop, self.stop, self.lease = self.stop, None, None
        if stop is not None:
            stop()
