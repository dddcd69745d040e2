"""The lease protocol in every state it can reach, within small bounds; and what breaks without each of its parts."""

import pytest
from campaigns import amount
from lease_model import Bounds, Model
from state_search import Outcome, explore

LIMIT = 400_000
SCOPES = {
    "with writes": Bounds(attempts=1, messages=amount(2, short=1)),
    "without loss": Bounds(attempts=1, messages=3, loss=False, writes=False),
    "for many ticks": Bounds(attempts=1, time=amount(5, short=3), writes=False),
}
BROKEN = {
    "no look at the clock": ("P2", Bounds(writes=False)),
    "validity from the reply": ("P2", Bounds(writes=False)),
    "renewal from the reply": ("P2", Bounds(writes=False)),
    "foreign release": ("P2", Bounds(writes=False)),
    "one owner for all attempts": ("P2", Bounds(writes=False)),
    "no guard": ("P3", Bounds(attempts=1)),
    "fence not raised": ("P3", Bounds(attempts=1)),
    "counter in the record": ("P4", Bounds(writes=False)),
    "given up once": ("P5", Bounds(loss=False, writes=False, messages=3)),
    "never given up": ("P5", Bounds(loss=False, writes=False, messages=3)),
    "renewal creates": ("P5", Bounds(attempts=1, loss=False, writes=False, messages=3)),
}


@pytest.mark.campaign
@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_breaks_a_promise(scope: str):
    outcome = explore(Model(SCOPES[scope]), LIMIT)
    assert not outcome.broken, outcome.way
    assert outcome.exhausted
    assert outcome.states > 25_000


@pytest.mark.parametrize("broken", BROKEN)
def test_every_part_of_the_protocol_is_needed(broken: str):
    promise, bounds = BROKEN[broken]
    outcome = explore(Model(bounds, broken), LIMIT)
    assert outcome.broken.startswith(promise)
    assert 5 <= len(outcome.way) <= 20


def test_the_shortest_way_to_a_broken_promise_can_be_read():
    """Without a look at the clock: the grant expires while its holder does not look."""
    outcome = explore(Model(Bounds(writes=False), "no look at the clock"), LIMIT)
    assert outcome.way[0] == "c0 asks"
    assert outcome.way.count("a tick") >= 2
    assert outcome.way[-1] == "c0 reads its token"


def test_a_search_that_did_not_end_does_not_count():
    assert explore(Model(Bounds()), 1000) == Outcome(1000, exhausted=False)
