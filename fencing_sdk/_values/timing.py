"""
The arithmetic of a lease, and the refusal of every mix of numbers that cannot be safe.

    deadline = sent_at + ttl * (1 - DRIFT) - safety_buffer

``sent_at`` is the local clock before the request left, so a slow answer buys no time. `DRIFT`
covers clocks that run at different rates, the buffer covers what happens after the deadline: the
delivery of the cancellation and the last write on its way. (Gray & Cheriton, "Leases", SOSP 1989;
the ordering of the numbers is that of kubernetes/client-go's leader election.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache

from fencing_sdk.errors import ConfigurationError, shown

Seconds = float | timedelta

DEFAULT_TTL = 15.0
MIN_TTL = 0.05
MAX_TTL = 86_400.0
DRIFT = 0.01
"""Fraction by which the store's clock may run faster than ours."""
MIN_INTERVAL = 0.001
"""Seconds between heartbeats: microseconds that are passed for seconds must not flood the store."""
RELEASE_LIMIT = 2.0
"""Seconds for which a caller waits for its release, and the closing of a client for a waiter that leaves a line."""
BUFFER, INTERVAL = "safety_buffer", "heartbeat_interval"
RENEWALS_BEFORE_DEADLINE = 3
"""A heartbeat at one interval, a second attempt at two, and the deadline not before three."""
_LONGEST_PAUSE, _SHORTEST_PAUSE = 1 / 4, 1 / 32
"""Parts of an interval between the attempts after a renewal without an answer: far from the end, and close to it."""
_SHORTEST_LIMIT = 1 / 4
"""Part of an interval that the answer to a renewal is waited for, however close the deadline is."""


def seconds(value: object, parameter: str, *, low: float = 0.0, high: float = math.inf, above: bool = False) -> float:
    """
    Return *value*, a number of seconds or a timedelta, as a float within *low* and *high*.

    With *above*, *low* itself is refused. A bool is refused although Python counts it as a number:
    ``ttl=True`` would otherwise be a lock of one second.

    Raises:
        ConfigurationError: naming *parameter* and what it takes.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{parameter} must be seconds as an int or a float, or a timedelta, not {type(value).__name__}"
        raise ConfigurationError(msg)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        msg = f"{parameter} must be finite, got {shown(number)}"
        raise ConfigurationError(msg)
    if number < low or (above and number == low):
        msg = f"{parameter} must be {'more than' if above else 'at least'} {low:g} s, got {number:g}"
        raise ConfigurationError(msg)
    if number > high:
        msg = f"{parameter} must be at most {high:g} s, got {number:g}"
        raise ConfigurationError(msg)
    return number


def patience(wait: object) -> float | None:
    """Return seconds to wait for another holder; None waits for ever."""
    return None if wait is None else seconds(wait, "wait")


def check_ttl(ttl: object, parameter: str = "ttl") -> float:
    """Return *ttl* in seconds if a lease can live on it: 50 ms to one day."""
    return seconds(ttl, parameter, low=MIN_TTL, high=MAX_TTL)


def _rounded_down(number: float) -> str:
    """Five digits of *number* that are not above it: advice has to be accepted when it is followed."""
    digits = f"{number:.5g}"
    return digits if float(digits) <= number else f"{number * (1 - 1e-4):.5g}"


@dataclass(frozen=True, slots=True)
class Timing:
    """The numbers of one lock, known to fit together."""

    ttl: float
    safety_buffer: float
    heartbeat_interval: float
    max_hold: float | None = None
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """The numbers that the user has set: the others follow the ttl that the store grants."""
    valid_for: float = field(init=False, repr=False, compare=False)
    """Seconds that a grant may be used, counted from before its request."""
    call_limit: float = field(init=False, repr=False, compare=False)
    """Seconds one acquire or release may take: half of what an acquire could still be worth."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "valid_for", self.validity(self.ttl))
        object.__setattr__(self, "call_limit", self.valid_for / 2)

    @classmethod
    def build(
        cls,
        *,
        ttl: Seconds = DEFAULT_TTL,
        safety_buffer: Seconds | None = None,
        heartbeat_interval: Seconds | None = None,
        max_hold: Seconds | None = None,
    ) -> Timing:
        """
        Check the numbers one by one and against each other, and fill in the defaults.

        Raises:
            ConfigurationError: a number is out of range, or no two renewal attempts fit between a
                heartbeat and the deadline; the message says which number to change.
        """
        try:
            return _built(ttl, safety_buffer, heartbeat_interval, max_hold)
        except Exception:  # noqa: BLE001, S110  (bad input, whose hash may raise anything: the checks below name it)
            pass
        return _build(ttl, safety_buffer, heartbeat_interval, max_hold)

    def refuse_what_cannot_be_safe(self) -> None:
        """Check the numbers against each other."""
        misfit = _too_large(self)
        if misfit == BUFFER:
            msg = (
                f"safety_buffer={self.safety_buffer:g} leaves nothing of ttl={self.ttl:g} "
                f"(less {DRIFT:.0%} for clocks that drift); make the buffer smaller or the ttl larger"
            )
            raise ConfigurationError(msg)
        if misfit == INTERVAL:
            msg = (
                f"heartbeat_interval={self.heartbeat_interval:g} leaves no room for two renewal attempts "
                f"before the deadline {self.validity(self.ttl):g} s after sending; make it at most "
                f"{_rounded_down(self.longest_interval)}, or make the ttl larger"
            )
            raise ConfigurationError(msg)

    def granted(self, ttl: float | None) -> Timing:
        """
        Return the timing of a lease for which the store granted *ttl*, where that is less than the claim's.

        The buffer and the interval become parts of *ttl*, unless the user has set them.

        Raises:
            ConfigurationError: what the user has set does not fit into so short a lease.
        """
        if ttl is None or ttl >= self.ttl:
            return self
        shorter = _filled(
            ttl,
            self.safety_buffer if BUFFER in self.given else None,
            self.heartbeat_interval if INTERVAL in self.given else None,
            max_hold=self.max_hold,
        )
        misfit = _too_large(shorter)
        if misfit is not None:
            raise ConfigurationError(_too_short(shorter, misfit, self.ttl))
        return shorter

    @property
    def longest_interval(self) -> float:
        """Seconds between heartbeats at which two attempts just fit before the deadline."""
        usable = self.validity(self.ttl)
        third = usable / RENEWALS_BEFORE_DEADLINE
        return third if third * RENEWALS_BEFORE_DEADLINE <= usable else math.nextafter(third, 0.0)

    def validity(self, ttl: float) -> float:
        """Return the seconds that a ticket which lives for *ttl* may be used, counted from before its request."""
        shorter = ttl < self.ttl and BUFFER not in self.given
        return ttl * (1 - DRIFT) - (_buffer_for(ttl) if shorter else self.safety_buffer)

    def deadline(self, sent_at: float) -> float:
        """The local moment the lease ends when the request left at *sent_at*."""
        return sent_at + self.valid_for

    def renewal_limit(self, left: float) -> float:
        """
        Seconds to wait for the answer to a renewal that is sent *left* seconds before the deadline.

        An interval, and towards the deadline half of what is left: a request that was swallowed must
        not take the time of the next one, by which the lease could still be saved.
        """
        return min(left, self.heartbeat_interval, max(left / 2, self.heartbeat_interval * _SHORTEST_LIMIT))

    def retry_pause(self, left: float) -> float:
        """Seconds after which a renewal without an answer is sent again: fewer, the less is *left* to the deadline."""
        longest, shortest = self.heartbeat_interval * _LONGEST_PAUSE, self.heartbeat_interval * _SHORTEST_PAUSE
        return min(longest, max(left / 4, shortest))


def _build(
    ttl: Seconds,
    safety_buffer: Seconds | None,
    heartbeat_interval: Seconds | None,
    max_hold: Seconds | None,
) -> Timing:
    timing = _filled(
        check_ttl(ttl),
        None if safety_buffer is None else seconds(safety_buffer, BUFFER),
        None if heartbeat_interval is None else seconds(heartbeat_interval, INTERVAL, low=MIN_INTERVAL),
        max_hold=None if max_hold is None else seconds(max_hold, "max_hold", above=True),
    )
    timing.refuse_what_cannot_be_safe()
    return timing


def _buffer_for(ttl: float) -> float:
    """Return the safety buffer of a lease for which the user has set none."""
    return ttl / 5


def _filled(ttl: float, buffer: float | None, interval: float | None, *, max_hold: float | None) -> Timing:
    """Fill in what is None with the default for *ttl*. Whether the numbers fit together is not checked."""
    timing = Timing(
        ttl=ttl,
        safety_buffer=_buffer_for(ttl) if buffer is None else buffer,
        heartbeat_interval=math.inf if interval is None else interval,
        max_hold=max_hold,
        given=frozenset(name for name, number in ((BUFFER, buffer), (INTERVAL, interval)) if number is not None),
    )
    if interval is not None:
        return timing
    return replace(timing, heartbeat_interval=min((ttl - timing.safety_buffer) / 4, timing.longest_interval))


def _too_large(timing: Timing) -> str | None:
    """The number that does not fit into the ttl, if one does not."""
    longest = timing.longest_interval
    if not longest >= MIN_INTERVAL:  # "not", so that a ttl of NaN from a store is refused as well
        return BUFFER
    return INTERVAL if timing.heartbeat_interval > longest else None


def _too_short(timing: Timing, misfit: str, asked: float) -> str:
    """Why the ttl that a store grants, instead of *asked* seconds, is too short for *misfit*; and what helps."""
    if misfit not in timing.given:
        return f"the store grants {timing.ttl:g} s, which is too short for any heartbeat"
    if misfit == BUFFER:
        return (
            f"safety_buffer={timing.safety_buffer:g} was set for ttl={asked:g}, and leaves nothing of the "
            f"{timing.ttl:g} s that the store grants; make it smaller, or leave it out"
        )
    return (
        f"heartbeat_interval={timing.heartbeat_interval:g} was set for ttl={asked:g}, and in the {timing.ttl:g} s "
        f"that the store grants it leaves no room for two renewal attempts; make it at most "
        f"{_rounded_down(timing.longest_interval)}, or leave it out"
    )


_built = lru_cache(maxsize=128, typed=True)(_build)
"""A program has few timings and many locks. Typed, because ``True`` equals 1 and is not a number of seconds."""
