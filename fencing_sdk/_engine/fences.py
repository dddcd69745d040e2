"""Fences that are raised at acquisition, before the body begins."""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._engine.terms import Terms
from fencing_sdk._values.claim import LOCK, Token
from fencing_sdk._values.scopes import move_on_after
from fencing_sdk.abc import Backend, Guard, SupportsFence
from fencing_sdk.errors import BackendUnavailableError, StaleTokenError

Fences = Sequence[tuple[Guard, str | None]]
"""Guards to raise at acquisition, each with its resource; None means the resource is named like the lock."""


def share_out(backend: Backend, terms: Terms, fences: Fences) -> tuple[Terms, Fences]:
    """Split *fences*: the terms get those that *backend* raises with the grant, and the others are returned."""
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
