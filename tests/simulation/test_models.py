"""A lease and a line of keys in every state they can reach within small bounds, and without each part."""

import pytest
from campaigns import amount
from lease_model import LeaseBounds, LeaseModel
from line_model import LineModel, Mishaps
from state_search import Outcome, explore

LIMIT = 400_000
SCOPES = {
    "a lease, with writes": LeaseBounds(attempts=1, messages=amount(2, short=1)),
    "a lease, without loss": LeaseBounds(attempts=1, messages=3, loss=False, writes=False),
    "a lease, for many ticks": LeaseBounds(attempts=1, time=amount(5, short=3), writes=False),
}
NO_WRITES, ONE_ATTEMPT = LeaseBounds(writes=False), LeaseBounds(attempts=1)
BROKEN = {
    "no look at the clock": ("P2", NO_WRITES),
    "validity from the reply": ("P2", NO_WRITES),
    "renewal from the reply": ("P2", NO_WRITES),
    "foreign release": ("P2", NO_WRITES),
    "one owner for all attempts": ("P2", NO_WRITES),
    "no guard": ("P3", ONE_ATTEMPT),
    "fence not raised": ("P3", ONE_ATTEMPT),
    "counter in the record": ("P4", NO_WRITES),
    "given up once": ("P5", LeaseBounds(loss=False, writes=False, messages=3)),
    "never given up": ("P5", LeaseBounds(loss=False, writes=False, messages=3)),
    "renewal creates": ("P5", LeaseBounds(attempts=1, loss=False, writes=False, messages=3)),
}


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_breaks_a_promise(scope: str):
    outcome = explore(LeaseModel(SCOPES[scope]), LIMIT)
    assert not outcome.broken, outcome.way
    assert outcome.exhausted
    assert outcome.states > 15_000


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_every_part_is_needed(broken: str):
    promise, bounds = BROKEN[broken]
    outcome = explore(LeaseModel(bounds, broken), LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 4 <= len(outcome.way) <= 20


def test_the_shortest_way_to_a_broken_promise_can_be_read():
    """Without a look at the clock: the grant expires while its holder does not look."""
    outcome = explore(LeaseModel(NO_WRITES, "no look at the clock"), LIMIT)
    assert outcome.way[0] == "c0 asks"
    assert outcome.way.count("a tick") >= 2
    assert outcome.way[-1] == "c0 reads its token"


def test_a_search_that_did_not_end_does_not_count():
    assert explore(LeaseModel(LeaseBounds()), 1000) == Outcome(1000, exhausted=False)


LINE = {
    **{
        f"watches alone, {kinds}": LineModel(kinds)
        for kinds in ("RRW", "RWW", "PPP", "PPW", *amount(("RRWW", "PPPP"), short=()))
    },
    **{
        f"cancelled, {kinds}": LineModel(kinds, mishaps=Mishaps(cancellations=1))
        for kinds in ("RRW", "RWR", "PP", "PPP")
    },
    **{
        f"pause and kill, {kinds}": LineModel(kinds, mishaps=Mishaps(pauses=amount(2, short=1), kills=1))
        for kinds in amount(("RRW", "RWW", "PPP"), short=("RW", "PP"))
    },
    **{
        f"one fence for all modes, {kinds}": LineModel(kinds, permits=1, one_fence=True, mishaps=Mishaps(pauses=1))
        for kinds in ("RLR", "WRL", "RPR", *amount(("RLRW", "PRLR", "WRLP"), short=()))
    },
    "one fence for permits in two rounds": LineModel(
        "PP", permits=1, rounds=2, one_fence=True, mishaps=Mishaps(pauses=1)
    ),
    "pause in two rounds": LineModel(amount("RRW", short="RW"), rounds=2, mishaps=Mishaps(pauses=1)),
}
LINE_BROKEN = {
    "a phase is drawn": ("P3", LineModel("WRL", broken="a phase is drawn")),
    **{
        f"a phase outlives {kind}": (
            "P3",
            LineModel(f"R{kind}R", permits=1, one_fence=True, broken=f"a phase outlives {kind}"),
        )
        for kind in "LWP"
    },
    "drawn without a look at the own key": (
        "P",
        LineModel("RWW", mishaps=Mishaps(pauses=1), broken="drawn without a look at the own key"),
    ),
    "a reader watches the key before it": ("P8", LineModel("WRR", broken="a reader watches the key before it")),
    "a number beside a waiter": ("P1", LineModel("PP", broken="a number beside a waiter")),
    "a permit watches the key before it": ("P8", LineModel("PPP", broken="a permit watches the key before it")),
}


@pytest.mark.slow
@pytest.mark.parametrize("scope", LINE)
def test_no_state_of_a_line_of_keys_breaks_a_promise(scope):
    outcome = explore(LINE[scope], LIMIT)
    assert not outcome.broken, (outcome.broken, outcome.way)
    assert outcome.exhausted


@pytest.mark.parametrize("broken", LINE_BROKEN)
def test_every_rule_of_a_line_of_keys_is_needed(broken):
    promise, model = LINE_BROKEN[broken]
    outcome = explore(model, LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 2 <= len(outcome.way) <= 25
