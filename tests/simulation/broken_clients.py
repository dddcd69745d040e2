"""Broken clients: what would happen if one line of the engine were not there."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk._engine.acquisition import Acquisition, Terms
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.heartbeat import Heartbeat, LeaseGroup
from fencing_sdk._engine.lease_scope import LeaseScope
from fencing_sdk._engine.releases import Releases
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._engine.ticket import Ticket
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values import claim, timing
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Claim, Place
from fencing_sdk.errors import LeaseLostError, LossReason
from tests.simulation.aims import (
    cut_off,
    failing_bodies,
    frozen_over_a_renewal,
    late_bells,
    refused_for_long,
    short_lives,
    silent_for_long,
    slow_cancelled,
    slow_then_cut,
    unheard,
)
from tests.simulation.control import Change, Control
from tests.simulation.stage import ClientClock

_judge = Acquisition._judge
_apply = Heartbeat._apply
_announce = LeaseState._announce
_begin = Engine._begin
_end_expired = LeaseGroup.end_expired
_ask = StoreCalls.ask
_send = Heartbeat._send
_take = Ticket.take


def _validity_from_reply() -> Iterable[Change]:
    def judge(self, place):
        self.ticket.counts_from = self._clock.now()
        return _judge(self, place)

    yield Acquisition, "_judge", judge


def _renewal_from_reply() -> Iterable[Change]:
    def apply(self, lease, outcome, _sent_at, error):
        _apply(self, lease, outcome, self._clock.now(), error)

    yield Heartbeat, "_apply", apply


def _no_allowance() -> Iterable[Change]:
    yield timing, "_built", timing._build  # the real one remembers timings, and would remember these
    yield timing.Timing, "validity", lambda _self, ttl: ttl


def _work_goes_on() -> Iterable[Change]:
    def announce(self):
        scope, self._scope = self._scope, None
        _announce(self)
        self._scope = scope

    yield LeaseState, "_announce", announce


def _stepped_clock() -> Iterable[Change]:
    yield ClientClock, "now", lambda self: self.steady.now() + self.stepped


def _revival() -> Iterable[Change]:
    def extend(self, deadline):
        self.lost = None
        self.deadline = max(self.deadline, deadline)
        return True

    yield LeaseState, "extend", extend
    yield LeaseState, "held_at", lambda self, _now: not self.released
    yield LeaseState, "held", property(lambda self: not self.released)
    yield StoreCalls, "ask", lambda self, operation, call, limit: _ask(self, operation, call, 4 * limit)


def _token_without_clock() -> Iterable[Change]:
    yield LeaseState, "check", lambda _self: None


def _fences_forgotten() -> Iterable[Change]:
    async def raise_fences(_self, _lease, _terms, _apart):
        pass

    yield Engine, "_raise_fences", raise_fences


def _nothing_given_up() -> Iterable[Change]:
    async def nothing(_self, _claim, _calls, _limit, _returned):
        pass

    yield StoreCalls, "_undo", nothing


def _given_up_once() -> Iterable[Change]:
    async def once(self, claim, _calls, limit, _returned):
        await self._release(claim, limit)

    yield StoreCalls, "_undo", once


def _looked_too_late() -> Iterable[Change]:
    """An error that this engine had until the simulation found it."""

    async def undo(self, claim, calls, limit, _returned):
        await self._release(claim, limit)
        pending = [call for call in calls if not call.done()]
        if pending:
            await asyncio.wait(pending, timeout=claim.ttl)
            await self._release(claim, limit)

    yield StoreCalls, "_undo", undo


def _never_released() -> Iterable[Change]:
    async def nothing(_self, _claim, _limit, _first=None):
        return True

    yield StoreCalls, "_release", nothing
    yield Releases, "send_first", lambda _self, _lease: None


def _one_owner_for_all() -> Iterable[Change]:
    def claim(self):
        return Claim(self.store_name, self.timing.ttl, owner=f"owner of {id(asyncio.get_running_loop())}")

    yield Terms, "claim", claim


def _renewed_for_ever() -> Iterable[Change]:
    kept = []

    def begin(self, *grant):
        lease = _begin(self, *grant)
        kept.append(lease)
        return lease

    def end_expired(self, now):
        """Without this, a group looks at a lease that is over and never leaves it, again and again."""
        _end_expired(self, now)
        for lease in [lease for lease in self.members.values() if lease.released and lease.deadline <= now]:
            self.remove(lease)

    yield Engine, "_begin", begin
    yield LeaseGroup, "end_expired", end_expired
    yield Heartbeat, "forget", lambda self, owner: self.leases.pop(owner, None)  # and not out of its group
    yield LeaseState, "held_at", lambda self, now: self.lost is None and now < self.deadline


def _one_error_is_a_loss() -> Iterable[Change]:
    def apply(self, lease, outcome, sent_at, error):
        if outcome is None:
            lease.lose(LossReason.REFUSED)
        else:
            _apply(self, lease, outcome, sent_at, error)

    yield Heartbeat, "_apply", apply


def _slow_to_try_again() -> Iterable[Change]:
    yield Timing, "retry_pause", lambda self, _left: self.heartbeat_interval * 2


def _waits_too_long() -> Iterable[Change]:
    yield Timing, "renewal_limit", lambda self, left: min(left, self.heartbeat_interval * 2)


def _never_renewed() -> Iterable[Change]:
    def send(self, _leases, tickets, now):
        if tickets:
            _send(self, (), tickets, now)

    yield Heartbeat, "_send", send


def _lost(scope: LeaseScope) -> LeaseLostError:
    return LeaseLostError(scope.lease.name, scope.state.number, LossReason.EXPIRED)


def _error_replaced() -> Iterable[Change]:
    def conclude(self, _departure, original):
        if original is not None:
            raise _lost(self)

    yield LeaseScope, "conclude", conclude


def _error_wrapped() -> Iterable[Change]:
    def conclude(_self, _departure, original):
        if isinstance(original, Exception):
            msg = "unhandled errors"
            raise ExceptionGroup(msg, [original])

    yield LeaseScope, "conclude", conclude


def _loss_silent() -> Iterable[Change]:
    yield LeaseScope, "conclude", lambda _self, _departure, _original: None


def _cancellation_replaced() -> Iterable[Change]:
    conclude = LeaseScope.conclude

    def concluded(self, departure, original):
        if isinstance(departure.raised, asyncio.CancelledError):
            raise _lost(self)
        conclude(self, departure, original)

    yield LeaseScope, "conclude", concluded


def _hung_for_ever() -> Iterable[Change]:
    def begin(self, name, acquired):
        return _begin(self, name, acquired._replace(timing=replace(acquired.timing, max_hold=None)))

    yield Engine, "_begin", begin


def _same_owner_twice() -> Iterable[Change]:
    yield claim, "new_owner", lambda: "0123456789abcdef" * 2


# Tickets that wait.


def _bells_deaf() -> Iterable[Change]:
    """Neither a bell nor the answer of a keep wakes the waiter."""

    def take(self, answer, sent_at):
        news, self.news = self.news, None
        _take(self, answer, sent_at)
        self.news = news

    yield Ticket, "take", take
    yield Ticket, "ring", lambda _self, _news: False


def _bell_of_any_number() -> Iterable[Change]:
    """A late bell about a ticket that has died is taken for one about the ticket of the latest answer."""

    def ring(self, news):
        if self.latest is None or not isinstance(news, Place) or news.token is None:
            return True
        self.latest = news
        if self.news is not None:
            self.news.set()
        return False

    yield Ticket, "ring", ring


def _counts_from_the_bell() -> Iterable[Change]:
    hear = Heartbeat.rung

    def rung(self, ticket, news):
        before = ticket.latest
        hear(self, ticket, news)
        if ticket.latest is not before:
            ticket.counts_from = self._clock.now()

    yield Heartbeat, "rung", rung


def _lives_for_its_ttl() -> Iterable[Change]:
    """A ticket that waited is counted on for the ttl of its claim, and not for the life of one that waits."""

    def take(self, answer, sent_at):
        _take(self, answer, sent_at)
        if answer is not None:
            self.lives = self.claim.ttl

    yield Ticket, "take", take


def _waiter_not_kept() -> Iterable[Change]:
    yield Heartbeat, "wait", lambda self, ticket: self._waiting.setdefault(ticket)


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, **options)


CONTROLS = (
    _of("P1", "validity counted from the reply", "overrun stale_read", _validity_from_reply,
        themes=("network",), aim=slow_then_cut("acquire", 0.36)),
    _of("P1", "renewal counted from the reply", "overrun stale_read", _renewal_from_reply,
        themes=("network",), aim=slow_then_cut("renew", 0.22)),
    _of("P1", "no allowance for drift, no buffer", "overrun stale_read", _no_allowance,
        themes=("network",), aim=cut_off),
    _of("P1", "work is not cancelled", "overrun", _work_goes_on, themes=("network",), aim=cut_off),
    _of("P1", "deadline on a clock that is stepped", "overrun stale_read lost_without_cause", _stepped_clock,
        themes=("clocks",)),
    _of("P2", "token read without a look at the clock", "stale_read", _token_without_clock, themes=("pauses",)),
    _of("P2", "a late renewal revives", "revived", _revival, aim=frozen_over_a_renewal),
    _of("P3", "fences are not raised at acquisition", "fence_not_raised", _fences_forgotten, within=200),
    _of("P4", "every process draws the same owner", "shared_token overrun two_grants stale_read foreign_release "
        "held_without_grant", _same_owner_twice),
    _of("P5", "an abandoned acquisition is not released", "never_released leaked_grant", _nothing_given_up,
        themes=("cancellation",)),
    _of("P5", "an abandoned acquisition is released once", "leaked_grant", _given_up_once,
        themes=("cancellation",), aim=slow_cancelled),
    _of("P5", "looks too late whether an answer is due", "leaked_grant", _looked_too_late,
        themes=("cancellation",), within=100),
    _of("P5", "leaving does not release", "kept_after_release never_released", _never_released),
    _of("P5", "one owner id for every attempt", "stale_read overrun held_without_grant leaked_grant "
        "renewed_after_release kept_after_release", _one_owner_for_all),
    _of("P5", "renewal after release", "renewed_after_release", _renewed_for_ever),
    _of("P6", "one failed renewal is a loss", "lost_without_cause", _one_error_is_a_loss, themes=("store", "network")),
    _of("P6", "a refused renewal is tried again too late", "lost_without_cause", _slow_to_try_again,
        aim=refused_for_long),
    _of("P6", "a swallowed renewal is waited for too long", "lost_without_cause", _waits_too_long,
        aim=silent_for_long),
    _of("P6", "the heartbeat never renews", "lost_without_cause", _never_renewed, themes=("calm",)),
    _of("P7", "the loss replaces the error of the body", "wrong_error", _error_replaced, aim=failing_bodies),
    _of("P7", "the error of the body is wrapped", "wrong_error", _error_wrapped, aim=failing_bodies),
    _of("P7", "the loss is not reported", "wrong_error", _loss_silent, themes=("pauses",)),
    _of("P7", "the loss replaces an outer cancellation", "wrong_error", _cancellation_replaced,
        themes=("cancellation",)),
    _of("P1", "a bell about another ticket is a grant", "overrun stale_read two_grants held_without_grant "
        "shared_token token_fell", _bell_of_any_number, aim=late_bells, within=100),
    _of("P1", "a grant counts from its bell", "overrun stale_read", _counts_from_the_bell, aim=unheard(1.0, 0.6)),
    _of("P1", "a waiter counts on its full ttl", "overrun stale_read", _lives_for_its_ttl, aim=unheard(20.0, 3.0)),
    _of("P8", "a waiter misses its wake-up", "waited_too_long", _bells_deaf),
    _of("P8", "a ticket that waits is not kept", "waited_too_long left_behind", _waiter_not_kept, aim=short_lives),
    _of("P8", "a hung body is renewed for ever", "waited_too_long left_behind", _hung_for_ever),
)  # fmt: skip
