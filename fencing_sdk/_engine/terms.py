"""The terms of an acquisition: all that a lock knows of itself, and the fences it raises before its body begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tenacity

from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._lease import AnyLease
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.claim import LOCK, Claim, Mode
from fencing_sdk._values.reports import label_of
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk._values.timing import Timing
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.abc._powers import SupportsFence
from fencing_sdk.errors import BackendUnavailableError, StaleTokenError

Backoff = Callable[[tenacity.RetryCallState], float]
"""A tenacity wait strategy: ``wait_exponential(...) + wait_random(...)``, or any callable like one."""

DEFAULT_BACKOFF: Backoff = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)
NO_FENCES: tuple[()] = ()

_LAST_CALL = 2.0
"""Seconds that a request may take although the patience ends meanwhile."""


class Tries:
    """The tries of one caller, as a tenacity wait strategy sees them."""

    __slots__ = ("_backoff", "_state")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._state = tenacity.RetryCallState(tenacity.AsyncRetrying(wait=backoff), None, (), {})

    def pause_after(self, error: Exception) -> float:
        """Seconds until the next try, after one that ended with *error*."""
        self._state.set_exception((type(error), error, None))
        pause = max(0.0, float(self._backoff(self._state)))
        self._state.prepare_for_next_attempt()
        self._state.idle_for += pause
        return pause


class Terms(NamedTuple):
    """The terms of an acquisition. ``name`` is the user's, ``store_name`` has the namespace."""

    name: str
    store_name: str
    timing: Timing
    wait: float | None
    backoff: Backoff
    label: str | None = None
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
        return Claim(self.store_name, self.timing.ttl, None, label_of(self.label) or None, self.mode)

    def limit(self, started: float, sent_at: float) -> float:
        """Seconds that a request may take, of an acquisition that *started* then."""
        limit = self.timing.call_limit
        return limit if self.wait is None else min(limit, max(_LAST_CALL, started + self.wait - sent_at))


Fences = Sequence[tuple[Guard, str | None]]
"""Guards to raise at acquisition, each with its resource; None means the resource is named like the lock."""


def share_out(backend: Backend, terms: Terms, fences: Fences) -> tuple[Terms, Fences]:
    """Split *fences*: those that *backend* raises atomically with the grant go into the terms; return the rest."""
    named = [(guard, terms.name if resource is None else resource) for guard, resource in fences]
    keeps = backend.keeps if terms.mode is LOCK and isinstance(backend, SupportsFence) else None
    joint = [] if keeps is None else [fence for fence in named if keeps(fence[0])]
    return terms._replace(fences=joint), [fence for fence in named if fence not in joint]


async def raise_all(lease: LeaseState, terms: Terms, apart: Fences, report: LeaseReport) -> None:
    """
    Raise the fences *apart* that came not with the grant, one after the other, and report all.

    Raises:
        StaleTokenError, BackendUnavailableError, LeaseLostError: as `_raise`.
        Exception: what a guard raised.
    """
    for _, resource in terms.fences:
        report.fence_raised(lease, resource, lease.token)
    for guard, name in apart:
        resource, token = lease.resource(name or terms.name), lease.token
        try:
            await _raise(lease, guard, resource, token)
        except StaleTokenError as error:
            report.stale(lease, error)
            raise
        lease.check()
        report.fence_raised(lease, resource, token)


async def _raise(lease: LeaseState, guard: Guard, resource: str, token: Token) -> None:
    """
    Ask *guard*, within what the lease is worth now, and once more at half-time, as the answer may be lost.

    To raise a fence twice is to raise it once.

    Raises:
        StaleTokenError: the resource has seen a later token.
        BackendUnavailableError: the guard did not answer, and the lease goes on.
        LeaseLostError: the guard did not answer, and the lease is over.
    """
    worth = lease.remaining
    for _ in range(2):
        with move_on_after(worth / 2):
            await guard.raise_to(resource, token)
            return
    lease.check()
    raise BackendUnavailableError(backend_name(guard), "raise_to", f"no answer within {worth:.3g} s")
