"""
What a lock service may answer: a table of grants, of one line for each name, and of reasons, written from the promises.

It shares no code with a store. A method takes the answer that a store gave, raises `Differs` if the promises do not
allow that answer, and otherwise notes what the answer means. Where the promises leave a choice, the reference follows
the store: a reader may be granted while only readers stand before it; a waiter that was silent for too long comes back
in its old place or at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fencing_sdk.abc import Busy, Claim, Grant, Holder, Mode, Permit, Renewal, Revoked, Waiting

LINE_TTL = 3.0
"""Seconds without a sign of life after which a waiter has lost its place."""
_POLL = 2.0
"""Seconds by which a store may advise a waiter to come later than it could."""


class Differs(AssertionError):
    """A store's answer is not allowed."""


@dataclass(slots=True)
class Hold:
    """A grant that was given and not released. It has ended when its time is over."""

    claim: Claim
    token: int
    permit: int | None
    ends: float


@dataclass(slots=True)
class Stander:
    """A waiter in a line."""

    claim: Claim
    number: int
    """Its place among all that ever joined."""
    seen: float
    """Its last sign of life that the store has certainly taken for one."""
    maybe: float
    """The last one that a store may take for one, such as a try."""
    woken: bool = False
    """It was woken, and has not tried since."""
    could: bool = False
    """It might have been granted at some moment since it joined, so that the store may have woken it."""
    returned: bool = False
    """It was silent for too long, and has come back: its place is shown by the store."""


@dataclass(slots=True)
class Name:
    """What is known of one name."""

    holds: dict[str, Hold] = field(default_factory=dict)
    line: list[Stander] = field(default_factory=list)
    last: int = -1
    """The highest token so far."""
    only_readers_since: bool = False
    """The last token is that of readers, and nothing but readers was granted since."""
    granted: set[str] = field(default_factory=set)
    """The owners that ever held."""
    reasons: dict[str, tuple[str, float]] = field(default_factory=dict)
    """For each owner whose grant was revoked: why, and until when the store has to know it."""


def require(condition: bool, what: str) -> None:
    """Raise `Differs` with *what* unless *condition*."""
    if not condition:
        raise Differs(what)


def room_for(mode: Mode, held: Sequence[Mode]) -> bool:
    """Whether a claim of *mode* may be granted beside grants of the modes *held*."""
    if mode.word in {"lock", "writer"}:
        return not held
    if mode.word == "reader":
        return all(other.word == "reader" for other in held)
    assert isinstance(mode, Permit)
    return all(other.word == "permit" for other in held) and len(held) < mode.of


class Reference:
    """
    The state of a lock service whose clock is set by hand.

    Args:
        silence: Whether a waiter loses its place by being silent.

        first_holds: Whether waiters are shown as holders as soon as it is their turn, before they try.

        lags: Whether a node of the store may be behind: it shows a holder whose release the others have carried out, or
            grants a holder later than they, with a higher number.
    """

    def __init__(self, *, silence: bool = True, first_holds: bool = False, lags: bool = False) -> None:
        self.now = 0.0
        self.names: dict[str, Name] = {}
        self._arrivals = itertools.count()
        self._silence = silence
        self._first_holds = first_holds
        self._lags = lags

    def of(self, name: str) -> Name:
        return self.names.setdefault(name, Name())

    # Who holds, and who waits

    def held(self, name: str) -> list[Hold]:
        """The grants that have not ended."""
        return [hold for hold in self.of(name).holds.values() if hold.ends > self.now]

    def holds(self, claim: Claim) -> Hold | None:
        return next((hold for hold in self.held(claim.name) if hold.claim.owner == claim.owner), None)

    def stander(self, claim: Claim) -> Stander | None:
        return next((one for one in self.of(claim.name).line if one.claim.owner == claim.owner), None)

    def _alive(self, one: Stander) -> bool:
        return not self._silence or self.now - one.seen < LINE_TTL

    def _dead(self, one: Stander) -> bool:
        return self._silence and self.now - one.maybe >= LINE_TTL

    def lives(self, one: Stander) -> bool:
        """Whether a waiter surely has its place."""
        return self._alive(one) and not one.returned

    def moments(self) -> list[float]:
        """When grants end, and when waiters lose their places."""
        ends = [hold.ends for name in self.names.values() for hold in name.holds.values()]
        return ends + [
            at + LINE_TTL for name in self.names.values() for one in name.line for at in (one.seen, one.maybe)
        ]

    def unsure(self, name: str) -> bool:
        """Whether only the store knows if, or where, a waiter stands."""
        return any(one.returned or not (self._alive(one) or self._dead(one)) for one in self.of(name).line)

    def _room(self, mode: Mode, name: str) -> bool:
        return room_for(mode, [hold.claim.mode for hold in self.held(name)])

    def look_round(self, name: str) -> None:
        """Note which waiters might be granted now."""
        for one in self.of(name).line:
            room = self._room(one.claim.mode, name)
            reads = one.claim.mode.word == "reader" and self._only_readers_before(one.claim, one)
            one.could = one.could or (room and (reads or True in self._turns(one.claim, one)))

    def to_wake(self, name: str) -> Stander | None:
        """The waiter that has to hear of it when a name becomes free for it."""
        living = [one for one in self.of(name).line if not self._dead(one)]
        if not living or self.unsure(name) or living[0].woken or not self._room(living[0].claim.mode, name):
            return None
        return living[0]

    def entering(self, name: str) -> list[Stander]:
        """The waiters that are shown as holders, where the first in line hold before they try."""
        entering: list[Stander] = []
        modes = [hold.claim.mode for hold in self.held(name)]
        for one in self.of(name).line if self._first_holds else ():
            if not room_for(one.claim.mode, modes):
                break
            entering.append(one)
            modes.append(one.claim.mode)
        return entering

    # What calls answer

    def acquired(self, claim: Claim, answer: Grant | Busy) -> None:
        """Take the answer to an acquisition, of a newcomer, a waiter, or the holder itself."""
        mine, stander = self.holds(claim), self.stander(claim)
        if mine is not None:
            require(isinstance(answer, Grant), f"the holder was refused: {answer}")
            assert isinstance(answer, Grant)
            same = answer.permit == mine.permit and (
                answer.token == mine.token or (self._lags and answer.token > mine.token)
            )
            require(
                same, f"another grant than {mine}: {answer}"
            )  # a node that lagged has given the owner a higher number
            mine.token = answer.token
            mine.ends = self.now + claim.ttl if answer.restarted else mine.ends
            return
        room = self._room(claim.mode, claim.name)
        verdicts = {room and turn for turn in self._turns(claim, stander)}
        if room and claim.mode.word == "reader" and self._only_readers_before(claim, stander):
            verdicts.add(True)
        kind = "a grant" if isinstance(answer, Grant) else "a refusal"
        why = "" if room else ": there is no room"
        require(isinstance(answer, Grant) in verdicts, f"{kind} out of turn{why}: {answer}")
        if isinstance(answer, Grant):
            self.granted(claim, answer)
            return
        self._later(claim.name, answer)
        if stander is not None:
            self._sign(stander, surely=False)
            stander.woken = False

    def _turns(self, claim: Claim, stander: Stander | None) -> set[bool]:
        """Whether no waiter comes before the claim: both, if only the store knows."""
        before = self._before(claim, stander)
        if any(self._alive(one) and not one.returned for one in before):
            turns = {False}
        else:
            turns = {True} if all(self._dead(one) for one in before) else {True, False}
        if stander is not None and (stander.returned or not self._alive(stander)):  # perhaps at the end
            others = [one for one in self.of(claim.name).line if one is not stander and not self._dead(one)]
            turns |= {False} if others else set()
        return turns

    def _before(self, claim: Claim, stander: Stander | None) -> list[Stander]:
        line = self.of(claim.name).line
        return line if stander is None else line[: line.index(stander)]

    def _only_readers_before(self, claim: Claim, stander: Stander | None) -> bool:
        before = self._before(claim, stander)
        return all(one.claim.mode.word == "reader" for one in before if not self._dead(one))

    def granted(self, claim: Claim, grant: Grant) -> None:
        """Take a grant that is allowed: its token, its number, and that its owner waits no more."""
        name, held = self.of(claim.name), self.held(claim.name)
        reads = claim.mode.word == "reader"
        if held and reads:
            require(grant.token == held[0].token, f"readers that hold together have two tokens: {grant}")
        elif reads and name.only_readers_since:
            require(grant.token >= name.last, f"the token fell below {name.last}: {grant}")
        else:
            require(grant.token > name.last, f"the token did not grow beyond {name.last}: {grant}")
        taken = {hold.permit for hold in held}
        of = claim.mode.of if isinstance(claim.mode, Permit) else 0
        lowest = next((number for number in range(of) if number not in taken), None)
        require(grant.permit == lowest, f"the number is not the lowest free one, {lowest}: {grant}")
        name.last, name.only_readers_since = grant.token, reads
        name.holds[claim.owner] = Hold(claim, grant.token, grant.permit, self.now + claim.ttl)
        name.reasons.pop(claim.owner, None)
        name.granted.add(claim.owner)
        name.line[:] = [one for one in name.line if one.claim.owner != claim.owner]

    def handed(self, claim: Claim, grant: Grant) -> None:
        """Take a grant that the store made for a waiter without being asked."""
        stander = self.stander(claim)
        require(stander is not None, f"a grant for an owner that does not wait: {grant}")
        require(self._room(claim.mode, claim.name), f"handed to a waiter for which there is no room: {grant}")
        require(True in self._turns(claim, stander), f"handed to a waiter whose turn it is not: {grant}")
        self.granted(claim, grant)

    def _later(self, name: str, answer: Busy) -> None:
        longest = max([LINE_TTL, *(hold.ends - self.now for hold in self.held(name))]) + _POLL
        advice = answer.retry_after
        require(advice is None or 0 <= advice <= longest, f"the advice is not within {longest:.3f} s: {answer}")

    def renewed(self, claim: Claim, outcome: object) -> None:
        mine = self.holds(claim)
        if mine is None:
            self._refused(claim, outcome)
        else:
            require(outcome is Renewal.RENEWED, f"a living grant was not renewed: {outcome}")
            mine.ends = self.now + claim.ttl

    def released(self, claim: Claim, outcome: object) -> None:
        """Take the answer to a release. Of an owner that never held, a store need not know that."""
        if self.holds(claim) is None:
            if outcome is not None or claim.owner in self.of(claim.name).granted:
                self._refused(claim, outcome)
        else:
            require(outcome is None, f"a living grant was not released: {outcome}")
        self.of(claim.name).holds.pop(claim.owner, None)

    def transferred(self, of: Claim, to: Claim, answer: Grant | Renewal | Revoked) -> None:
        """Take the answer to a transfer: the heir has the mode and the number, and a token of its own."""
        mine, name = self.holds(of), self.of(of.name)
        if mine is None:
            require(not isinstance(answer, Grant), f"a transfer of what is not held: {answer}")
            self._refused(of, answer)
            return
        require(isinstance(answer, Grant), f"a living grant was not transferred: {answer}")
        assert isinstance(answer, Grant)
        if of.mode.word == "reader":
            require(answer.token == mine.token, f"a reader's token has changed: {answer}")
        else:
            require(answer.token > name.last, f"the token did not grow beyond {name.last}: {answer}")
            name.last = answer.token
        require(answer.permit == mine.permit, f"the number was {mine.permit}: {answer}")
        del name.holds[of.owner]
        name.holds[to.owner] = Hold(to, answer.token, answer.permit, self.now + to.ttl)
        name.reasons[of.owner] = (f"handed over to {to.holder}", mine.ends)
        name.granted.add(to.owner)

    def _refused(self, claim: Claim, outcome: object) -> None:
        """Why the owner's grant is over."""
        reason, until = self.of(claim.name).reasons.get(claim.owner, ("", -1.0))
        held = self.held(claim.name)
        if isinstance(outcome, Revoked):
            require(until >= 0 and outcome.reason == reason, f"no revocation had this reason: {outcome}")
            return
        require(self.now >= until, f"the reason {reason!r} was lost: {outcome}")
        require(outcome in {Renewal.REFUSED, Renewal.TAKEN_OVER}, f"a grant that is over was not refused: {outcome}")
        if not held and not self.entering(claim.name) and not self._lags:
            require(outcome is Renewal.REFUSED, "taken over by an owner that does not hold")
        alone = held and not claim.mode.shared and not held[0].claim.mode.shared
        if alone and claim.owner in self.of(claim.name).granted:
            require(outcome is Renewal.TAKEN_OVER, "refused as if the name were free")

    def revoked(self, name: str, token: int, reason: str, answer: bool) -> None:
        ended = [hold for hold in self.held(name) if hold.token == token]
        require(answer is bool(ended), f"{len(ended)} grants had the token, and the answer is {answer}")
        for hold in ended:
            self.of(name).reasons[hold.claim.owner] = (reason, hold.ends)
            del self.of(name).holds[hold.claim.owner]

    # The line

    def joined(self, claim: Claim) -> None:
        self.of(claim.name).line.append(Stander(claim, next(self._arrivals), self.now, self.now))

    def left(self, claim: Claim) -> None:
        line = self.of(claim.name).line
        line[:] = [one for one in line if one.claim.owner != claim.owner]

    def signed(self, claims: Iterable[Claim], *, surely: bool) -> None:
        """Note signs of life: a store takes some of them for one *surely*, and others perhaps."""
        for claim in claims:
            if (stander := self.stander(claim)) is not None:
                self._sign(stander, surely=surely)

    def _sign(self, stander: Stander, *, surely: bool) -> None:
        stander.returned = stander.returned or not self._alive(stander)
        stander.maybe = self.now
        if surely:
            stander.seen = self.now

    # What is shown

    def shown(self, name: str, holders: Sequence[Holder], *, exactly: bool) -> None:
        """Compare who holds. *exactly*: also the seconds that are left."""
        held = sorted(self.held(name), key=lambda hold: (hold.permit or 0, hold.token, hold.claim.holder))
        entering = {one.claim.holder for one in self.entering(name)}
        found = sorted(
            (one for one in holders if one.id not in entering),
            key=lambda one: (one.permit or 0, one.token, one.id),
        )
        expected = [
            (name, hold.claim.holder, hold.token, hold.claim.mode, hold.permit, hold.claim.label) for hold in held
        ]
        seen = [(one.name, one.id, one.token, one.mode, one.permit, one.label) for one in found]
        require(seen == expected, f"{expected} hold, and {seen} are shown")
        waiting = sum(self._alive(one) for one in self.of(name).line)
        for hold, one in zip(held, found, strict=True):
            left = hold.ends - self.now
            require(0 < one.remaining <= left + 0.01, f"{left:.3f} s are left, and {one.remaining:.3f} are shown")
            require(not exactly or one.remaining > left - 0.01, f"{left:.3f} s are left: {one.remaining:.3f} are shown")
            if one.waiters is not None and not self.unsure(name) and not entering:
                require(one.waiters == waiting, f"{waiting} wait, and {one.waiters} are counted")

    def line_shown(self, name: str, waiters: Sequence[Waiting]) -> None:
        """Compare who waits, and in which order. The store decides where waiters stand that were silent for long."""
        line = self.of(name).line
        places = {one.claim.holder: one for one in line}
        for one in waiters:
            stander = places.get(one.id)
            require(stander is not None, f"{one.id} does not wait, and is shown")
            assert stander is not None
            require(not self._dead(stander), f"{one.id} has lost its place, and is shown")
            described = (stander.claim.mode, stander.claim.label)
            require((one.mode, one.label) == described, f"{one} does not wait for {stander.claim}")
        shown = [places[one.id] for one in waiters]
        entering = [one for one in self.entering(name) if one not in shown]
        expected = [one for one in line if self._alive(one) and not one.returned and one not in entering]
        kept = [one for one in shown if one in expected]
        require(kept == expected, f"{_names(expected)} wait in this order, and {_names(shown)} are shown")
        for one in line:
            if one not in shown and not self._dead(one):  # it has lost its place, and does not know it yet
                one.seen = one.maybe = self.now - LINE_TTL
        for place, one in enumerate(shown):
            if not self._alive(one):
                one.seen = one.maybe
            if one.returned and any(ahead.number > one.number for ahead in shown[:place]):
                one.number = next(self._arrivals)
            one.returned = False
        line.sort(key=lambda one: one.number)


def _names(line: Sequence[Stander]) -> list[str]:
    return [one.claim.holder for one in line]
