"""
The reference table against a model that forgets nothing.

The model keeps the whole history as a list and answers every question by searching it. It shares
no code with the table, so that an error would have to be made twice, in two ways.
"""

from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from campaigns import amount
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fencing_sdk._values.claim import holder_of
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.abc import Claim, Grant, Held, Holder, Renewal
from fencing_sdk.backends._shared import row_table as _table
from fencing_sdk.backends._shared.row_table import RowTable, TableRows
from fencing_sdk.backends._shared.rules import LINE_POLL, LINE_TTL, token_source
from fencing_sdk.errors import BackendRefusedError, ConfigurationError

NAMES = ("a", "b")
OWNERS = ("red", "green", "blue")
TTLS = st.sampled_from([0.5, 1.0, 2.0])  # exact in binary, so that a ttl can end at this very moment
PAUSES = st.sampled_from([0.25, 0.5, 1.0, LINE_TTL])
CALLS = ("acquire", "renew", "time", "join", "release", "acquire", "leave", "inspect", "whom_to_wake", "time", "revoke")
claims = st.builds(
    Claim,
    name=st.sampled_from(NAMES),
    owner=st.sampled_from(OWNERS),
    ttl=TTLS,
    metadata=st.sampled_from([None, "", "batch"]),
)


@dataclass
class Given:
    """A grant as history remembers it."""

    claim: Claim
    token: int
    ends: float
    given_back: bool = False
    began: float = 0.0


@dataclass
class History:
    """Everything that ever happened. Slow on purpose."""

    grants: list[Given] = field(default_factory=list)
    line: list[tuple[str, str, float]] = field(default_factory=list)  # name, owner, last sign of life

    def living(self, name: str, now: float) -> Given | None:
        living = [g for g in self.grants if g.claim.name == name and not g.given_back and now < g.ends]
        assert len(living) <= 1
        return living[0] if living else None

    def place(self, claim: Claim) -> int | None:
        places = [i for i, (name, owner, _) in enumerate(self.line) if (name, owner) == (claim.name, claim.owner)]
        assert len(places) <= 1
        return places[0] if places else None

    def see(self, claim: Claim, now: float) -> bool:
        place = self.place(claim)
        if place is None:
            return False
        self.line[place] = (claim.name, claim.owner, now)
        return True

    def remove(self, claim: Claim) -> None:
        self.line = [entry for entry in self.line if entry[:2] != (claim.name, claim.owner)]

    def front(self, name: str, now: float) -> tuple[str, float] | None:
        """The first who is alive; the dead in front of it are out of the line, those behind may still return."""
        for entry in [entry for entry in self.line if entry[0] == name]:
            if now < entry[2] + LINE_TTL:
                return entry[1], entry[2]
            self.line.remove(entry)
        return None

    def expected(self, claim: Claim, now: float) -> object:
        """What an acquire must answer: the living grant, "new", or how many seconds to wait."""
        living = self.living(claim.name, now)
        if living is not None and living.claim.owner == claim.owner:
            return living
        in_line = self.see(claim, now)
        front = self.front(claim.name, now)
        if living is not None:
            left = living.ends - now
        elif front is not None and front[0] != claim.owner:
            left = front[1] + LINE_TTL - now
        else:
            return "new"
        return min(left, LINE_POLL) if in_line else left


class Comparison(RuleBasedStateMachine):
    """Plays the same calls to the table and to history."""

    table_class: type[RowTable] = RowTable
    steps = 0

    @initialize(tokens=st.sampled_from(["hybrid", "counter"]))
    def begin(self, tokens: str):
        self.now = 0.0
        self.wall = 0
        self.highest = 0
        self.table = self.table_class(token_source(tokens, lambda: self.wall))
        self.history = History()

    @rule(call=st.sampled_from(CALLS), claim=claims, aimed=st.booleans(), seconds=PAUSES, wall=st.integers(0, 30))
    def step(self, call: str, claim: Claim, aimed: bool, seconds: float, wall: int):
        if aimed and self.history.grants:  # one whose grant lives, or has just ended
            claim = replace(self.history.grants[-1].claim, ttl=claim.ttl)
        if call == "time":
            self.now += seconds
            self.wall = wall
        else:
            getattr(self, call)(claim)

    @invariant()
    def keeps_nothing_of_what_is_over(self):
        type(self).steps += 1
        waiting = {name for name, _, _ in self.history.line}
        assert len(self.table) <= len(NAMES) + len(waiting)

    def acquire(self, claim: Claim):
        expected = self.history.expected(claim, self.now)
        outcome = self.table.acquire(claim, self.now)
        if expected == "new":
            assert isinstance(outcome, Grant)
            assert outcome.token > self.highest
            self.highest = outcome.token
            self.history.grants.append(Given(claim, outcome.token, self.now + claim.ttl, began=self.now))
            self.history.remove(claim)
        elif isinstance(expected, Given):
            assert outcome == Grant(expected.token)
            expected.ends = self.now + claim.ttl
        else:
            assert outcome == Held(expected)
            assert outcome.retry_after > 0

    def renew(self, claim: Claim):
        living = self.history.living(claim.name, self.now)
        if living is None:
            expected = Renewal.REFUSED
        elif living.claim.owner != claim.owner:
            expected = Renewal.TAKEN_OVER
        else:
            expected = Renewal.RENEWED
            living.ends = self.now + claim.ttl
        assert self.table.renew(claim, self.now) is expected

    def release(self, claim: Claim):
        living = self.history.living(claim.name, self.now)
        if living is None:
            expected = Renewal.REFUSED
        else:
            expected = None if living.claim.owner == claim.owner else Renewal.TAKEN_OVER
        assert self.table.release(claim, self.now) is expected
        for given in self.history.grants:
            if (given.claim.name, given.claim.owner) == (claim.name, claim.owner):
                given.given_back = True

    def revoke(self, claim: Claim):
        name = claim.name
        living = self.history.living(name, self.now)
        assert self.table.revoke(name, self.now) == ([living.claim.owner] if living else [])
        if living is not None:
            living.given_back = True

    def join(self, claim: Claim):
        self.table.join(claim, self.now)
        living = self.history.living(claim.name, self.now)
        if living is not None and living.claim.owner == claim.owner:
            return
        if not self.history.see(claim, self.now):
            self.history.line.append((claim.name, claim.owner, self.now))

    def leave(self, claim: Claim):
        self.table.leave(claim)
        self.history.remove(claim)

    def whom_to_wake(self, claim: Claim):
        name = claim.name
        awake = self.table.next_in_line(name, self.now)
        if self.history.living(name, self.now) is not None:
            assert awake is None
        else:
            front = self.history.front(name, self.now)
            assert awake == (front and front[0])

    def inspect(self, claim: Claim):  # a step and no invariant: a grant has to end although nobody looks
        name = claim.name
        shown = self.table.inspect(name, self.now)
        living = self.history.living(name, self.now)
        if living is None:
            assert shown is None
        else:
            left = living.ends - self.now
            holder = holder_of(living.claim.owner)
            expected = Holder(name, living.token, holder, left, living.claim.metadata)
            waiting = sum(other == name and self.now < seen + LINE_TTL for other, _, seen in self.history.line)
            assert shown == replace(expected, held_for=self.now - living.began, waiters=waiting)


def compare(table: type[RowTable], *, examples: int, shrink: bool = True) -> int:
    """Play random calls to *table* and to history; return how many."""
    machine = type("Machine", (Comparison,), {"table_class": table, "steps": 0})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=phases,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.steps


@pytest.mark.campaign
@pytest.mark.parametrize("sweep_from", [0, 64])
def test_the_table_answers_as_history_does(sweep_from: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_table, "_SWEEP_FROM", sweep_from)
    examples = amount(100, short=30)
    assert compare(RowTable, examples=examples) > 40 * examples


class RevivesTheExpired(RowTable):
    def renew(self, claim, now):
        row = self.grants.get(claim.name, {}).get(claim.owner)
        return super().renew(claim, min(now, row.expires - 0.125) if row else now)


class ForgetsTheLastToken(RowTable):
    def release(self, claim, now):
        refusal = super().release(claim, now)
        self.last_token -= refusal is None
        return refusal


class ReleasesForAnybody(RowTable):
    def release(self, claim, now):
        refusal = super().release(claim, now)
        self.grants.pop(claim.name, None)
        return refusal


class LetsNewcomersOvertake(RowTable):
    def acquire(self, claim, now):
        lines, self.lines = self.lines, {}
        try:
            return super().acquire(claim, now)
        finally:
            self.lines = lines


class SendsTheImpatientToTheEnd(RowTable):
    def join(self, claim, now):
        self.leave(claim)
        super().join(claim, now)


class KeepsTheDeadInLine(RowTable):
    def join(self, claim, now):
        super().join(claim, now)
        for waiter in self.lines.get(claim.name, {}).values():
            waiter.silent_at = 1e9


class EndsAMomentTooLate(RowTable):
    def renew(self, claim, now):
        return super().renew(claim, now - 0.125)


class SweepsTheLiving(RowTable):
    def _sweep(self, now):
        self.grants.clear()


class LetsAHolderQueueBehindItself(RowTable):
    def join(self, claim, now):
        TableRows(self, claim.name, now).join(claim, None)


@pytest.mark.parametrize(
    "broken",
    [
        RevivesTheExpired,
        ForgetsTheLastToken,
        ReleasesForAnybody,
        LetsNewcomersOvertake,
        pytest.param(SendsTheImpatientToTheEnd, marks=pytest.mark.campaign(only=True)),  # it takes hundreds of examples
        KeepsTheDeadInLine,
        EndsAMomentTooLate,
        SweepsTheLiving,
        LetsAHolderQueueBehindItself,
    ],
)
def test_the_comparison_catches_a_broken_table(broken: type[RowTable], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_table, "_SWEEP_FROM", 0)
    with pytest.raises(AssertionError):
        compare(broken, examples=500, shrink=False)


def test_grants_that_nobody_asks_about_again_do_not_pile_up():
    table = RowTable(token_source("counter", lambda: 0))
    for number in range(10_000):
        assert isinstance(table.acquire(Claim(f"report/{number}", 1.0), now=float(number)), Grant)
    assert len(table) < 200


def test_a_thousand_living_grants_survive_the_sweep():
    table = RowTable(token_source("counter", lambda: 0))
    claims = [Claim(f"report/{number}", 60.0) for number in range(1000)]
    for claim in claims:
        table.acquire(claim, now=0.0)
    assert all(table.renew(claim, now=59.0) is Renewal.RENEWED for claim in claims)


def test_hybrid_tokens_follow_the_wall_clock_and_never_go_back_with_it():
    wall = iter([1000, 1000, 500, 2000])
    following = token_source("hybrid", lambda: next(wall))
    last, tokens = 0, []
    for _ in range(4):
        last = following(last)
        tokens.append(last)
    assert tokens == [1000, 1001, 1002, 2000]


def test_a_token_that_does_not_fit_into_53_bits_is_refused_and_not_granted():
    table = RowTable(token_source("hybrid", lambda: TOKEN_LIMIT))
    with pytest.raises(BackendRefusedError, match="53 bits"):
        table.acquire(Claim("a", 1.0), now=0.0)
    assert table.inspect("a", now=0.0) is None


def test_an_unknown_token_source_is_refused():
    with pytest.raises(ConfigurationError, match="'random'"):
        token_source("random", lambda: 0)
