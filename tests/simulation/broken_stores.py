"""Broken stores and resources: the mistakes that lock services and guards have been found with."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk.abc import Busy, Grant, Renewal
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_table import RowTable, TableRows
from fencing_sdk.errors import StaleTokenError
from tests.simulation.backend import SimulatedBackend
from tests.simulation.control import Change, Control
from tests.simulation.script import Fault, Script
from tests.simulation.service import NAME, Service
from tests.simulation.stage import Resource

_grant = rules.grant
_renew = RowTable.renew
_acquire = RowTable.acquire
_revoke = RowTable.revoke
_ask_acquire = SimulatedBackend.acquire


def _counter(script: Script) -> Script:
    """Tokens that only count, and a store that loses nothing."""
    faults = tuple(fault for fault in script.faults if not fault.kind.startswith("forget"))
    return replace(script, tokens="counter", faults=faults)


def _restarted(script: Script) -> Script:
    """A restart in the middle that loses everything, with tokens that only count."""
    return replace(
        script, tokens="counter", faults=(*script.faults, Fault(script.horizon / 2, "forget_all", lasts=0.1))
    )


def _clock_set_back(script: Script) -> Script:
    return replace(script, faults=(*script.faults, Fault(script.horizon / 2, "step_tokens", lasts=-script.horizon)))


def _late_writes(script: Script) -> Script:
    return replace(script, visits=tuple(replace(visit, body="zombie", lasts=0.1) for visit in script.visits))


def _mixed_writes(script: Script) -> Script:
    """Late writers between others, and no holder raises a fence."""
    bodies = ("zombie", "write", "write")
    visits = (replace(visit, body=bodies[n % 3], lasts=0.1, fenced=False) for n, visit in enumerate(script.visits))
    return replace(script, visits=tuple(visits))


def _late_renewals(script: Script) -> Script:
    """Renewals that arrive when their lease has been released."""
    slow = tuple(Fault(0.0, "late", who, 0.15 * script.ttl, "renew", "request") for who in range(script.clients))
    visits = tuple(replace(visit, body="sleep", lasts=0.25 * script.ttl) for visit in script.visits)
    return replace(script, visits=visits, faults=slow)


def _doubled_acquisitions(script: Script) -> Script:
    """Every acquisition arrives again, while its grant lasts."""
    again = tuple(
        Fault(0.0, "double", who, part * script.ttl, "acquire", "request", 1)
        for who in range(script.clients)
        for part in (0.02, 0.2)
    )
    visits = tuple(replace(visit, lasts=0.4 * script.ttl) for visit in script.visits)
    return replace(script, visits=visits, faults=again)


def _slow_draws(script: Script) -> Script:
    """Clients that ask for the lock, and whose second request is on its way until the grant is over."""
    slow = tuple(Fault(0.0, "late", who, 1.2 * script.ttl, "inspect", "request", 1) for who in range(script.clients))
    return replace(script, direct=False, faults=slow)


def _in_line(script: Script) -> Script:
    return replace(script, line=True)


def _two_at_a_time() -> Iterable[Change]:
    def acquire(self, claim, now):
        if claim.owner not in self.grants.get(claim.name, {}):
            self.grants.pop(claim.name, None)
        return _acquire(self, claim, now)

    yield RowTable, "acquire", acquire


def _renewal_creates() -> Iterable[Change]:
    def renew(self, claim, now):
        answer = _renew(self, claim, now)
        if answer is Renewal.REFUSED:
            _acquire(self, claim, now)
            return Renewal.RENEWED
        return answer

    yield RowTable, "renew", renew


def _fast_clock() -> Iterable[Change]:
    yield Service, "now", lambda self: self._clock.now() * 1.5


def _unfenced() -> Iterable[Change]:
    yield Resource, "arrived", lambda self, who, token, _sent: self.applied(who, token)


def _check_then_write() -> Iterable[Change]:
    def arrived(self, who, token, _sent):
        self.guard.write(self.name, token, lambda: None)
        self.timeline.at(self.timeline.now + 0.05, self.applied, who, token)

    yield Resource, "arrived", arrived


def _strictly_greater() -> Iterable[Change]:
    def arrived(self, who, token, _sent):
        fence = self.guard._fences.get(self.name)
        if fence is not None and token == fence:
            fields = {"resource": self.name, "token": int(token), "holder": token.holder, "fence": int(fence)}
            self._record("write_refused", who, **fields)
            raise StaleTokenError(self.name, int(token), int(fence))
        self.guard.write(self.name, token, self.applied, who, token)

    yield Resource, "arrived", arrived


def _forgetful_guard() -> Iterable[Change]:
    def arrived(self, who, token, _sent):
        fence = self.guard._fences.get(self.name)
        if fence is None or token >= fence:
            self.applied(who, token)

    yield Resource, "arrived", arrived


def _raising_ignored() -> Iterable[Change]:
    yield Resource, "raised", lambda _self, _resource, _token: None


def _shared_tokens() -> Iterable[Change]:
    def token_source(_self):
        drawn = itertools.count()
        return lambda _last: next(drawn) // 2

    yield Service, "token_source", token_source


def _blind_guard() -> Iterable[Change]:
    """Tokens are shared, and the guard does not look at the holder."""
    yield from _shared_tokens()

    def arrived(self, who, token, _sent):
        fence = self.guard._fences.get(self.name)
        if fence is None or token >= fence:
            self.guard._fences[self.name] = token
            self.applied(who, token)

    yield Resource, "arrived", arrived


def _wall_clock_tokens() -> Iterable[Change]:
    yield Service, "token_source", lambda self: lambda _last: self.wall_micros()


def _counter_in_the_record() -> Iterable[Change]:
    yield Service, "token_source", lambda _self: lambda _last: 1


def _drawn_before_the_grant() -> Iterable[Change]:
    counter = itertools.count(1)
    drawn: dict[str, int] = {}

    async def acquire(self, claim):
        if claim.owner not in drawn:
            drawn[claim.owner] = await self.link.ask(NAME, "inspect", "draw", lambda _: next(counter))
        return await _ask_acquire(self, claim)

    def grant(rows, claim):
        table = rows.table
        source, table.next_token = table.next_token, lambda _last: drawn[claim.owner]
        try:
            return _grant(rows, claim)
        finally:
            table.next_token = source

    yield SimulatedBackend, "acquire", acquire
    yield rules, "grant", grant


def _drawn_after_the_grant() -> Iterable[Change]:
    """The lock is granted in one step, its token drawn in a second one, and another may draw between them."""
    last = itertools.count(1)
    spans: dict[tuple[Service, str], list[float]] = {}  # of grants: since, until
    drawn: dict[tuple[Service, str], int] = {}
    recorded, ended = Service.record, Service.ended

    def record(self, kind, claim, _token, _permit=None):
        now, place = self._timeline.now, (self, claim.holder)
        if place in drawn:
            recorded(self, kind, claim, drawn[place])
        else:
            spans.setdefault(place, [now, now])[1] = now + claim.ttl / self._clock.rate

    def end(self, holder, why, by, **more):
        if (self, holder.id) in drawn:
            ended(self, holder, why, by, **more)
        else:
            spans[self, holder.id][1] = self._timeline.now

    async def acquire(self, claim):
        answer = await _ask_acquire(self, claim)
        if isinstance(answer, Busy):
            return answer
        service, place = self.service, (self.service, claim.holder)

        def draw(_client):
            if place not in drawn:
                since, until = spans[place]
                token = drawn[place] = next(last)
                fields = {"name": claim.name, "holder": claim.holder, "token": token}
                service._record("granted", NAME, **fields, since=since, until=until)
            return drawn[place]

        return Grant(await self.link.ask(NAME, "inspect", "draw", draw))

    yield Service, "record", record
    yield Service, "ended", end
    yield SimulatedBackend, "acquire", acquire


def _granted_again() -> Iterable[Change]:
    """A store that does not look at the owner: a repeated request gets a grant and a token of its own."""

    def acquire(self, claim, now):
        if claim.owner in self.grants.get(claim.name, {}):
            return _grant(TableRows(self, claim.name, now), claim)
        return _acquire(self, claim, now)

    yield RowTable, "acquire", acquire


def _foreign_release_accepted() -> Iterable[Change]:
    yield RowTable, "release", lambda self, claim, _now: self.grants.pop(claim.name, None) and None


def _revoked_whatever_the_token() -> Iterable[Change]:
    """An operator takes away what is held now, and not what was seen."""
    yield RowTable, "revoke", lambda self, name, now, _token=None: _revoke(self, name, now)


def _revoked_late(script: Script) -> Script:
    """Operators who look at every grant, and take it away when the next client may have it."""
    looks = tuple(
        Fault(visit.at + 0.05, "revoke", lasts=part * script.ttl, operation=visit.name)
        for visit in script.visits
        for part in (0.1, 0.4)
    )
    return replace(script, faults=looks)


def _renewal_forgets() -> Iterable[Change]:
    """A store that answers a renewal, and does not prolong anything."""
    yield RowTable, "renew", _answer_only


def _answer_only(table: RowTable, claim: Any, now: float) -> Renewal:
    owners = [row.owner for row in TableRows(table, claim.name, now).grants()]
    return Renewal.RENEWED if claim.owner in owners else Renewal.REFUSED


def _orphaned_place() -> Iterable[Change]:
    yield rules, "LINE_TTL", 1e9
    yield Service, "leave", lambda _self, _claim: None


def _never_free() -> Iterable[Change]:
    """A release is acknowledged and forgotten; so is the expiry of what was released."""
    yield RowTable, "release", lambda _self, _claim, _now: None


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, **options)


CONTROLS = (
    _of("P1", "the store grants what is held", "two_grants overrun stale_read", _two_at_a_time),
    _of("P1", "an acquisition that comes twice is granted twice", "two_grants", _granted_again,
        aim=_doubled_acquisitions),
    _of("P1", "renewal creates", "store_revived", _renewal_creates, aim=_late_renewals),
    _of("P1", "the store's clock runs too fast", "overrun stale_read two_grants store_revived", _fast_clock),
    _of("P3", "no guard", "stale_write_accepted", _unfenced, aim=_late_writes),
    _of("P3", "the guard checks, then writes", "stale_write_accepted fence_not_raised", _check_then_write,
        aim=_late_writes, within=200),
    _of("P3", "the guard wants a greater token", "newest_refused", _strictly_greater),
    _of("P3", "the guard does not remember writes", "stale_write_accepted", _forgetful_guard, aim=_mixed_writes),
    _of("P3", "raising a fence does nothing", "fence_not_raised", _raising_ignored, within=200),
    _of("P3", "a shared token passes the guard", "shared_token_accepted", _blind_guard),
    _of("P4", "two grants share a token", "shared_token", _shared_tokens),
    _of("P4", "token from a wall clock", "token_fell store_token_fell", _wall_clock_tokens, aim=_clock_set_back),
    _of("P4", "the counter is kept in the lock's record", "shared_token token_fell", _counter_in_the_record),
    _of("P4", "the counter is lost in a restart", "shared_token token_fell", Control.nothing, aim=_restarted),
    _of("P4", "token drawn before the grant", "token_fell store_token_fell", _drawn_before_the_grant,
        aim=_counter, within=100),
    _of("P4", "token drawn after the grant", "store_token_fell", _drawn_after_the_grant, aim=_slow_draws),
    _of("P5", "a foreign release is accepted", "foreign_release", _foreign_release_accepted, within=100),
    _of("P5", "a revocation compares no token", "foreign_revocation", _revoked_whatever_the_token, aim=_revoked_late),
    _of("P5", "a release is forgotten", "kept_after_release never_released leaked_grant", _never_free),
    _of("P6", "a renewal is confirmed and not done", "stale_read overrun store_revived lost_without_cause",
        _renewal_forgets),
    _of("P8", "a place in the line is never left", "waited_too_long", _orphaned_place, themes=("line", "pauses"),
        aim=_in_line),
)  # fmt: skip
