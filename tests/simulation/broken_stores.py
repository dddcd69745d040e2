"""Broken stores and resources: the mistakes that lock services and guards have been found with."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk.abc import Gone, Place
from fencing_sdk.abc.line import Line, Row
from fencing_sdk.errors import StaleTokenError
from tests.simulation.aims import crowded
from tests.simulation.backend import SimulatedBackend
from tests.simulation.control import Change, Control
from tests.simulation.script import Fault, Script, Visit
from tests.simulation.service import NAME, Service
from tests.simulation.stage import Resource

_draw = Line.draw
_end = Line.end
_give_back = Line.give_back
_keep = Line.keep
_settle = Line.settle
_live_on = Row.live_on
_ask_draw = SimulatedBackend.draw


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
    """A keep that arrives when its lease has been released."""
    visits = tuple(replace(visit, body="sleep", lasts=1.2, wait=None) for visit in script.visits[:1])
    late = (Fault(0.0, "late", visits[0].client, 1.0, "renew", "request", 1),)
    return replace(script, ttl=3.0, buffer=None, visits=visits, faults=late)


def _keep_of_the_dead(script: Script) -> Script:
    """A keep that arrives when its ticket and its client have died."""
    visits = (
        Visit(0, 0.1, "a", "sleep", 3.0, None, fenced=False),
        Visit(1, 4.0, "b", "sleep", 0.0, None, fenced=False),
    )
    faults = (Fault(0.0, "late", 0, 1.2, "renew", "request", 1), Fault(0.4, "crash", 0))
    return replace(script, ttl=1.0, buffer=None, visits=visits, faults=faults)


def _doubled_acquisitions(script: Script) -> Script:
    """Every acquisition arrives again, while its grant lasts."""
    again = tuple(
        Fault(0.0, "double", who, part * script.ttl, "acquire", "request", 1)
        for who in range(script.clients)
        for part in (0.02, 0.2)
    )
    visits = tuple(replace(visit, lasts=0.4 * script.ttl) for visit in script.visits)
    return replace(script, visits=visits, faults=again)


def _killed(script: Script) -> Script:
    """A client that dies while it waits behind another one."""
    visits = tuple(
        replace(visit, name="a", at=0.01 * n, client=(n + 1) % 2, lasts=1.0, wait=None, body="write")
        for n, visit in enumerate(script.visits)
    )
    return replace(script, polls=False, visits=visits, faults=(Fault(0.5, "crash", 0),))


def _two_at_a_time() -> Iterable[Change]:
    def draw(self, claim, now, **options):
        if claim.owner not in self.rows:
            self.rows.clear()
        return _draw(self, claim, now, **options)

    yield Line, "draw", draw


def _renewal_creates() -> Iterable[Change]:
    def keep(self, claim, now, number=0):
        answer = _keep(self, claim, now, number)
        return answer if isinstance(answer, Place) or number == 0 else _draw(self, claim, now)

    yield Line, "keep", keep


def _a_death_is_not_written_down() -> Iterable[Change]:
    """Who asks after its death lives on, unless its place has been given to another."""

    def keep(self, claim, now, number=0):
        row = self.rows.get(claim.owner)
        if row is not None and row.token is not None and row.dies <= now:
            row.dies = now + claim.ttl
        return _keep(self, claim, now, number)

    yield Line, "keep", keep


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

    async def draw(self, claim, **options):
        if claim.owner not in drawn:
            drawn[claim.owner] = await self.link.ask(NAME, "inspect", "draw", lambda _: next(counter))
        return await _ask_draw(self, claim, **options)

    def settle(self, now):
        before = {owner for owner, row in self.rows.items() if row.token is not None}
        held = _settle(self, now)
        for row in held:
            if row.owner not in before:
                row.token = drawn[row.owner]
        return held

    yield SimulatedBackend, "draw", draw
    yield Line, "settle", settle


def _granted_again() -> Iterable[Change]:
    """A store that does not look at the owner: a repeated request gets a token of its own."""

    def draw(self, claim, now, **options):
        row = self.rows.get(claim.owner)
        if row is not None and row.token is not None:
            row.token = self.last = self.next_token(self.last)
        return _draw(self, claim, now, **options)

    yield Line, "draw", draw


def _foreign_release_accepted() -> Iterable[Change]:
    def give_back(self, owner, now, after=0.0):
        if owner not in self.rows:
            for row in _settle(self, now):
                del self.rows[row.owner]
        return _give_back(self, owner, now, after)

    yield Line, "give_back", give_back


def _revoked_whatever_the_token() -> Iterable[Change]:
    """An operator ends what holds now, and not what was seen."""

    def end(self, token, reason, now):
        held = _settle(self, now)
        return _end(self, (held[0].token or 0) if held else token, reason, now)

    yield Line, "end", end


def _revoked_late(script: Script) -> Script:
    """Operators who look at every grant, and take it away when the next client may have it."""
    looks = tuple(
        Fault(visit.at + 0.05, "revoke", lasts=part * script.ttl, operation=visit.name)
        for visit in script.visits
        for part in (0.1, 0.4)
    )
    return replace(script, faults=looks)


def _renewal_forgets() -> Iterable[Change]:
    """A store that answers a keep, and does not prolong anything."""

    def keep(self, claim, now, number=0):
        row = self.rows.get(claim.owner)
        dies = None if row is None or row.token is None else row.dies
        answer = _keep(self, claim, now, number)
        if dies is not None:
            row.dies = dies
        return answer

    def draw(self, claim, now, **options):
        row = _keep(self, claim, now)
        return _draw(self, claim, now, **options) if isinstance(row, Gone) else row

    yield Line, "keep", keep
    yield Line, "draw", draw


def _keep_shortens() -> Iterable[Change]:
    """The late keep of a waiter sets the life of one that holds by now."""

    def live_on(self, ttl, now):
        _live_on(self, ttl, now)
        if self.token is not None and self.since < now:
            self.dies = now + 0.2 * ttl

    yield Row, "live_on", live_on


def _orphaned_place() -> Iterable[Change]:
    """A ticket that waits needs no sign of life."""

    def live_on(self, ttl, now):
        _live_on(self, ttl, now)
        if self.token is None:
            self.dies, self.longest = now + 1e9, 1e9

    yield Row, "live_on", live_on


def _silent_death() -> Iterable[Change]:
    """Who begins to hold when another gives back is not told, and is not looked for by a keep."""

    def give_back(self, owner, now, after=0.0):
        answer = _give_back(self, owner, now, after)
        self.rung.clear()
        return answer

    def keep(self, claim, now, number=0):
        answer = _keep(self, claim, now, number)
        row = self.rows.get(claim.owner)
        waited = row is not None and row.token is not None and number and row.since > now - 5
        return Place(None, None, row.number) if waited else answer

    yield Line, "give_back", give_back
    yield Line, "keep", keep


def _never_free() -> Iterable[Change]:
    """A release is acknowledged and forgotten."""
    yield Line, "give_back", lambda _self, _owner, _now, _after=0.0: None


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, **options)


CONTROLS = (
    _of("P1", "the store grants what is held", "two_grants overrun stale_read", _two_at_a_time),
    _of("P1", "an acquisition that comes twice is granted twice", "two_grants", _granted_again,
        aim=_doubled_acquisitions),
    _of("P1", "renewal creates", "leaked_grant", _renewal_creates, aim=_late_renewals),
    _of("P1", "a keep revives", "store_revived", _a_death_is_not_written_down, aim=_keep_of_the_dead),
    _of("P1", "a keep shortens", "stale_read overrun lost_without_cause", _keep_shortens),
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
    _of("P5", "a foreign release is accepted", "foreign_release", _foreign_release_accepted, within=100),
    _of("P5", "a revocation compares no token", "foreign_revocation", _revoked_whatever_the_token, aim=_revoked_late),
    _of("P5", "a release is forgotten", "kept_after_release never_released leaked_grant", _never_free),
    _of("P6", "a renewal is confirmed and not done", "stale_read overrun store_revived lost_without_cause",
        _renewal_forgets),
    _of("P8", "a ticket that waits needs no sign of life", "waited_too_long", _orphaned_place, aim=_killed),
    _of("P8", "a store that tells no waiter", "waited_too_long never_released", _silent_death, aim=crowded),
)  # fmt: skip
