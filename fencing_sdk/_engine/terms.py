"""What an acquisition is asked to do: all that a lock knows of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tenacity

from fencing_sdk._lease import AnyLease
from fencing_sdk._values.claim import LOCK, Claim, Mode
from fencing_sdk._values.holder_facts import metadata_of
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Guard

Backoff = Callable[[tenacity.RetryCallState], float]
"""A tenacity wait strategy: ``wait_exponential(...) + wait_random(...)``, or any callable like one."""

DEFAULT_BACKOFF: Backoff = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)
NO_FENCES: tuple[()] = ()

_LAST_CALL = 1.0
"""Seconds that a request may take although the patience ends meanwhile."""


class Tries:
    """The tries of one caller, as a tenacity wait strategy sees them."""

    __slots__ = ("_backoff", "_state")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._state = tenacity.RetryCallState(tenacity.AsyncRetrying(wait=backoff), None, (), {})

    def nap_after(self, error: Exception) -> float:
        """Seconds until the next try, after one that ended with *error*."""
        self._state.set_exception((type(error), error, None))
        nap = max(0.0, float(self._backoff(self._state)))
        self._state.prepare_for_next_attempt()
        self._state.idle_for += nap
        return nap


class Terms(NamedTuple):
    """What an acquisition is asked to do. ``name`` is the user's, ``store_name`` has the namespace."""

    name: str
    store_name: str
    timing: Timing
    wait: float | None
    backoff: Backoff
    metadata: str | None = None
    """What others see beside the grant; None for the facts about this process."""
    fences: Sequence[tuple[Guard, str]] = ()
    """Guards, each with its resource, whose fences the backend raises with the grant: see `SupportsFence`."""
    mode: Mode = LOCK
    on_held: Callable[[], object] | None = None
    """Called when the store answers that another holder has the lock."""
    under: tuple[AnyLease, ...] | None = None
    """The leases that the caller works under, where they are not all those of its context."""

    def claim(self) -> Claim:
        """A new claim, with an owner of its own."""
        return Claim(self.store_name, self.timing.ttl, None, metadata_of(self.metadata) or None, self.mode)

    def limit(self, started: float, sent_at: float) -> float:
        """Seconds that a request may take, of an acquisition that *started* then."""
        limit = self.timing.call_limit
        return limit if self.wait is None else min(limit, max(_LAST_CALL, started + self.wait - sent_at))
