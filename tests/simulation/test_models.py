"""A lease in every state that it can reach within small bounds, and the rules of a line in random histories."""

import pytest
from campaigns import amount
from lease_model import LeaseBounds, LeaseModel
from state_search import Outcome, explore
from ticket_model import FAULTS, World, planted, play

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


HISTORIES = amount(8000, short=40)
PART = amount(1000, short=40)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(0, HISTORIES, PART))
def test_no_history_of_a_line_breaks_a_promise(first):
    assert play(range(first, first + PART)) > 100 * PART


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_of_a_line_is_needed(fault):
    with planted(*FAULTS[fault]):
        for seed in range(140, 200):
            try:
                World(seed, hybrid=seed % 2 == 0).run()
            except (AssertionError, StopIteration):
                return
    pytest.fail("not caught")
