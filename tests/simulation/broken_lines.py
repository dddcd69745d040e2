"""Broken lines: what would happen if a grant were handed over with one precaution less."""

# Each of these stands in for a method of a class, from the inside.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fencing_sdk._engine.acquisition import Acquisition
from fencing_sdk.abc import Grant
from fencing_sdk.backends._shared import rules
from tests.simulation.control import Change, Control
from tests.simulation.handing import HandingBackend
from tests.simulation.script import Fault, Script
from tests.simulation.service import Service

_grant = Service.grant


def _handing(script: Script) -> Script:
    """Short visits of several clients to one lock, each of which waits."""
    visits = tuple(replace(visit, name="a", wait=None, lasts=0.3, body="write") for visit in script.visits)
    return replace(script, line=True, direct=True, visits=visits)


def _late_messages(script: Script) -> Script:
    """Answers and messages that are late by most of a ttl, or by more, and holders that work for as long."""
    script = replace(_handing(script), ttl=1.0, buffer=0.05)
    late = tuple(
        Fault(at, "late", who, (0.5 + 0.2 * step) * script.ttl, "acquire", "reply", 2)
        for step, at in enumerate((0.2, 1.0, 1.8, 2.6, 3.4))
        for who in range(script.clients)
    )
    visits = tuple(replace(visit, lasts=0.8) for visit in script.visits)
    return replace(script, visits=visits, faults=late)


def _lost_signs(script: Script) -> Script:
    """A message that is on its way for longer than its grant lasts, while signs of life are lost."""
    script = replace(_handing(script), ttl=1.0, buffer=0.05)
    faults = []
    for at in (0.3, 1.7, 3.1):
        for who in range(script.clients):
            faults.append(Fault(at, "late", who, 2.6, "acquire", "reply", 1))
            faults.append(Fault(at + 0.3, "lose", who, operation="acquire", way="request", times=2))
    visits = tuple(replace(visit, lasts=0.8) for visit in script.visits)
    return replace(script, visits=visits, faults=tuple(faults))


def _lost_messages(script: Script) -> Script:
    """Messages that are lost, so that a sign of life finds the grant; and then the renewals are lost."""
    script = _lost_renewals(replace(script, ttl=1.0))
    lost = tuple(
        Fault(0.2 * step, "lose", who, operation="acquire", way="reply", times=1)
        for step in range(15)
        for who in range(script.clients)
    )
    return replace(script, faults=(*script.faults, *lost))


def _lost_renewals(script: Script) -> Script:
    """Holders that work for as long as they may, and whose renewals are lost."""
    script = _handing(script)
    long = tuple(replace(visit, lasts=1.5 * script.ttl) for visit in script.visits)
    lost = tuple(Fault(0.0, "lose", who, operation="renew", way="request") for who in range(script.clients))
    return replace(script, buffer=0.05, visits=long, faults=lost)


def _cancelled(script: Script) -> Script:
    """Waiters that give up, and a ttl that is far away."""
    script = replace(_handing(script), ttl=20.0)
    visits = tuple(
        replace(visit, wait=0.4 if number % 2 else None, at=0.1 * number, lasts=0.5)
        for number, visit in enumerate(script.visits)
    )
    return replace(script, visits=visits, faults=())


def _killed(script: Script) -> Script:
    """A client that dies while it waits behind another one."""
    script = _handing(script)
    visits = (replace(visit, at=0.01 * n, client=(n + 1) % 2, lasts=1.0) for n, visit in enumerate(script.visits))
    return replace(script, visits=tuple(visits), faults=(Fault(0.5, "crash", 0),))


def _told_before_it_is_granted() -> Iterable[Change]:
    """PUBLISH before SET, and the server is slow in between."""

    def hand(self, sign):
        token = self.table.next_token(self.table.last_token)
        sign.hand(sign.claim, sign.number, Grant(token))
        del self.signs[sign.claim.name, sign.claim.owner]
        self.table.leave(sign.claim)
        self._timeline.at(self._timeline.now + 0.3, later, self, sign)

    def later(self, sign):
        if self.holder(sign.claim.name) is None:
            self.signs[sign.claim.name, sign.claim.owner] = sign
            _grant(self, sign)

    yield Service, "hand", hand


def _age_of_the_message() -> Iterable[Change]:
    yield HandingBackend, "age", lambda _self, _number: 0.0


def _age_of_the_latest_answer() -> Iterable[Change]:
    """The message does not say on which sign of life it was made, and the latest that was answered is taken for it."""
    yield HandingBackend, "age", lambda self, _number: self.now() - self._sent.get(self._answered, self.now())


def _age_forgotten() -> Iterable[Change]:
    """A message is used although its deadline has passed."""

    def take(self):
        if self._handed is None:
            return None
        (grant, _), self._handed = self._handed, None
        return self._judge(grant, self._clock.now())

    yield Acquisition, "_take_handed", take


def _short_offer() -> Iterable[Change]:
    """A part of the ttl until the waiter is heard of, which then counts on all of it."""
    yield Service, "grant", lambda self, sign: _grant(self, replace(sign, claim=_shortened(sign.claim)))


def _shortened(claim):
    return replace(claim, ttl=claim.ttl / 4)


def _repeated_without_a_fresh_ttl() -> Iterable[Change]:
    """A sign of life finds the grant whose message was lost, and the waiter counts from this sign."""

    def repeat(self, sign):
        holder = self.holder(sign.claim.name)
        return Grant(holder.token)

    yield Service, "repeat", repeat


def _left_without_a_release() -> Iterable[Change]:
    leave = Acquisition._leave_line

    def left(self):
        leave(self)
        return False

    yield Acquisition, "_leave_line", left
    yield HandingBackend, "release_late", lambda _self, _claim: None


def _handed_to_the_dead() -> Iterable[Change]:
    """A waiter is passed over neither because its connection is gone, nor because it gives no sign of life."""

    def hand_on(self, name):
        for owner in self.line(name):
            if self.holder(name) is None and (sign := self.signs.get((name, owner))) is not None:
                sign.hand(sign.claim, sign.number, None)
                break

    yield rules, "LINE_TTL", 1e9
    yield Service, "hand_on", hand_on


def _older_message_releases() -> Iterable[Change]:
    """A message that names another token than the one that its waiter went on with may be an old one."""
    yield HandingBackend, "is_newer", lambda _self, grant, token: grant.token != token


def _of(promise: str, name: str, rules: str, changes: Any, **options: Any) -> Control:
    return Control(name, promise, frozenset(rules.split()), changes, **options)


CONTROLS = (
    _of("P1", "a grant is told before it is made", "stale_read overrun two_grants held_without_grant",
        _told_before_it_is_granted, aim=_handing),
    _of("P1", "a handed grant counts from its message", "overrun stale_read two_grants", _age_of_the_message,
        aim=_late_messages),
    _of("P1", "a handed grant counts from the latest answered sign", "overrun stale_read two_grants",
        _age_of_the_latest_answer, aim=_lost_signs, within=200),
    _of("P1", "the age of a handed grant is forgotten", "overrun stale_read two_grants", _age_forgotten,
        aim=_late_messages),
    _of("P1", "an offer has a shorter ttl than its waiter counts on", "overrun stale_read two_grants", _short_offer,
        aim=_lost_renewals),
    _of("P1", "a grant is repeated to a sign of life without a fresh ttl", "overrun stale_read two_grants",
        _repeated_without_a_fresh_ttl, aim=_lost_messages),
    _of("P1", "an old message releases a new grant", "overrun stale_read two_grants", _older_message_releases,
        aim=_lost_signs),
    _of("P5", "a waiter that gives up is handed the lock and keeps it", "leaked_grant never_released",
        _left_without_a_release, aim=_cancelled),
    _of("P8", "the turn of a dead waiter never ends", "waited_too_long", _handed_to_the_dead, aim=_killed),
)  # fmt: skip
