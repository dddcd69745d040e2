"""
Leases that change hands: from a block of this client to a ticket, and what a ticket asks of the store.

The owner changes when a lease is detached, and again when its ticket is resumed. So no late renewal, release or draw of
the former owner reaches what follows, and of several that resume one ticket one alone goes on. The new owner is made
before the request, so that a retry after a lost answer finds it there. Where detaching fails, and where the caller is
cancelled, no caller has a ticket: the lock is given back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from fencing_sdk._engine.acquisition import refusal
from fencing_sdk._engine.releases import Releases
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._lease_state import LeaseState, loss_in
from fencing_sdk._lease_ticket import LeaseTicket, claim_of, timing_of, with_token
from fencing_sdk._values.claim import HELD, Claim, Gone, Place, Seen, new_owner
from fencing_sdk._values.clock import Clock, wall_seconds
from fencing_sdk._values.timing import RELEASE_LIMIT
from fencing_sdk.abc import Backend, PassesOn
from fencing_sdk.errors import (
    BackendError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    TicketRefusedError,
    UnsupportedError,
    UsageError,
    shown,
)

_T = TypeVar("_T")
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 1.0


def check_outlives(backend: Backend) -> None:
    """Raise `UnsupportedError` for a backend whose tickets end with the session of a process."""
    if getattr(backend, "ends_with_session", False):
        msg = f"{backend_name(backend)} has no detached leases: its store ends them with the session of the process"
        raise UnsupportedError(msg)


def check_passes_on(backend: Backend) -> PassesOn:
    """Return *backend* as one whose tickets change hands. Raises `UnsupportedError` if they do not."""
    check_outlives(backend)
    if not isinstance(backend, PassesOn):
        msg = (
            f"{backend_name(backend)} cannot hand a lease over: its store cannot change the owner of a ticket in one "
            "step; release the lock, and let the next process acquire it"
        )
        raise UnsupportedError(msg)
    return backend


class AskStore(Protocol):
    """Makes one call to the store that is about no lease of this client."""

    async def __call__(self, operation: str, call: Callable[[], Awaitable[_T]]) -> _T: ...


class HandOver:
    """The hand-overs of one client, and the requests of its tickets."""

    def __init__(self, backend: Backend, clock: Clock, releases: Releases, ask: AskStore) -> None:
        self._backend = backend
        self._clock = clock
        self._releases = releases
        self._ask = ask

    async def detach(self, lease: LeaseState, keep: float, ticket: LeaseTicket | None = None) -> LeaseTicket:
        """
        End *lease* here, and let the store keep the lock for a ticket. Errors are those of `Lease.detach`.

        *ticket*: one that was written down before, to be found by its owner whatever becomes of this process.
        """
        backend, claim = check_passes_on(self._backend), lease.claim
        lease.check()
        if lease.companion is not None or lease.keep_for:
            what = "a job, which keeps its lock by itself" if lease.keep_for else "two locks, one of them old"
            msg = f"the lease on {shown(lease.name)} cannot be detached: it is that of {what}"
            raise UsageError(msg)
        namespace = claim.name.removesuffix(lease.name).removesuffix(":")
        ticket = ticket or LeaseTicket(
            str(lease.name), keep, new_owner(), None, 0.0, claim.mode, lease.permit, claim.label, namespace
        )
        heir, calls, limit = claim_of(ticket), self._releases.store_calls, min(lease.timing.call_limit, RELEASE_LIMIT)
        lease.handed_to = ticket.holder
        lease.mark_released()  # before the owner changes: a renewal on its way, which finds it gone, is no loss
        self._releases.take(lease)
        try:
            number, sent_at = await self._pass_on(backend, lease, heir)
        except BaseException:
            lease.handed_to = None
            calls.start(_give_both_back(calls, claim, heir, limit))
            self._releases.report_end(lease, confirmed=False)
            raise
        if lease.unanswered_calls and lease.held_for < lease.timing.ttl:  # they would draw once more, after all of this
            calls.undo(claim, list(lease.unanswered_calls), limit)
        left = sent_at + timing_of(ticket).valid_for - self._clock.now()
        self._releases.report_end(lease, confirmed=True, kept_for=max(left, 0.0))
        return with_token(ticket, number, wall_seconds() + left)

    async def _pass_on(self, backend: PassesOn, lease: LeaseState, heir: Claim) -> tuple[int, float]:
        """Ask until there is an answer, or the deadline of *lease*; return the token, and when the request was sent."""
        calls, pause, problem = self._releases.store_calls, _FIRST_PAUSE, ""
        while (left := lease.deadline - (sent_at := self._clock.now())) > 0:
            limit = min(lease.timing.heartbeat_interval, left)
            try:
                outcome = await calls.ask("transfer", backend.pass_on(lease.claim, heir), limit)
            except BackendUnavailableError as error:
                problem = f": {error}"
            else:
                if isinstance(outcome, Place) and outcome.token is not None:
                    return outcome.token, sent_at
                lease.lose(*loss_in(outcome if isinstance(outcome, Gone) else Gone()), by_release=True)
                raise lease.loss()
            if calls.closing:
                break
            await calls.sleep_until_closing(min(pause, max(0.0, lease.deadline - self._clock.now())))
            pause = min(2 * pause, _LAST_PAUSE)
        lease.lose(LossReason.EXPIRED, by_release=True)
        detail = f"the store did not confirm the hand-over in time{problem}"
        raise LeaseLostError(lease.name, lease.number, LossReason.EXPIRED, detail)

    def leave(self, lease: LeaseState, ticket: LeaseTicket) -> LeaseTicket:
        """End *lease* here, which was drawn for *ticket*, and return the ticket with what it got. Nothing is sent."""
        lease.check()
        lease.handed_to = ticket.holder
        lease.mark_released()
        left = lease.deadline - self._clock.now()
        self._releases.take(lease)
        self._releases.report_end(lease, confirmed=True, kept_for=left)
        return with_token(ticket, lease.number, wall_seconds() + left)

    async def renew(self, ticket: LeaseTicket) -> LeaseTicket:
        """Restart the time of *ticket*, and return it with its new bound. Errors are those of `LockClient.renew`."""
        claim, sent_at, wall = claim_of(ticket), self._clock.now(), wall_seconds()
        (outcome,) = await self._ask("renew", lambda: self._backend.keep(((claim, 0),)))
        if outcome is None:
            raise BackendUnavailableError(backend_name(self._backend), "renew")
        if isinstance(outcome, Gone):
            raise await self.explained(ticket, refusal(ticket, outcome))
        token: int | None = ticket.token
        if outcome.token != HELD.token:
            ticket, token = replace(ticket, permit=outcome.permit), outcome.token
        elif token is None:  # a taker that was killed before it could write the answer down
            token = next((each.token for each in await self._seen(ticket) if each.holder == ticket.holder), None)
        valid_for = timing_of(ticket).valid_for
        if (late := self._clock.now() - sent_at >= valid_for) or token is None:
            raise TicketRefusedError(ticket.name, ticket.token, LossReason.EXPIRED if late else LossReason.REFUSED)
        return with_token(ticket, token, wall + valid_for)

    async def release(self, ticket: LeaseTicket) -> None:
        """Give back what *ticket* stands for. Errors are those of `LockClient.release`."""
        await self._ask("release", lambda: self._backend.give_back(claim_of(ticket)))

    async def explained(self, ticket: LeaseTicket, error: TicketRefusedError) -> TicketRefusedError:
        """Return *error* with the holder that has the lock now, if the store shows one."""
        if error.reason not in {LossReason.HANDED_OVER, LossReason.TAKEN_OVER}:
            return error
        try:
            seen = await self._seen(ticket)
        except BackendError:
            return error
        who = next((f"{each.holder} (token {each.token:d})" for each in seen if each.token is not None), "")
        return TicketRefusedError(error.name, error.token, error.reason, who)

    async def _seen(self, ticket: LeaseTicket) -> Sequence[Seen]:
        (seen,) = await self._ask("inspect", lambda: self._backend.tickets((claim_of(ticket).name,)))
        return seen


async def _give_both_back(calls: StoreCalls, claim: Claim, heir: Claim, limit: float) -> None:
    await calls.release(claim, limit)  # first: once that is answered, no late request passes its place on
    await calls.release(heir, limit)
