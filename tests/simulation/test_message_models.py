"""A lease and a direct grant in every state they can reach, within small bounds; and what breaks without each part."""

import pytest
from campaigns import amount
from grant_model import GrantBounds, GrantModel
from lease_model import LeaseBounds, LeaseModel
from message_model import MessageBounds, MessageModel
from state_search import Outcome, explore

LIMIT = 400_000
MODELS = {LeaseBounds: LeaseModel, GrantBounds: GrantModel}
SCOPES = {
    "a lease, with writes": LeaseBounds(attempts=1, messages=amount(2, short=1)),
    "a lease, without loss": LeaseBounds(attempts=1, messages=3, loss=False, writes=False),
    "a lease, for many ticks": LeaseBounds(attempts=1, time=amount(5, short=3), writes=False),
    "a grant, with loss": GrantBounds(time=amount(4, short=2)),
    "a grant, with renewals": GrantBounds(time=amount(4, short=2), renewals=True),
    "a grant, without loss": GrantBounds(time=amount(3, short=2), messages=3, loss=False),
}
NO_WRITES, ONE_ATTEMPT = LeaseBounds(writes=False), LeaseBounds(attempts=1)
SURE, LOSSY = GrantBounds(loss=False, messages=3), GrantBounds()
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
    "a grant is told before it is made": ("P1", SURE),
    "a grant counts from its message": ("P1", SURE),
    "a grant counts from the latest sign": ("P1", LOSSY),
    "an offer is shorter than the ttl": ("P1", SURE),
    "a grant is repeated without a fresh ttl": ("P1", LOSSY),
    "an old message releases a new grant": ("P1", SURE),
    "a waiter gives up without a release": ("P5", SURE),
    "a message for one that has left is dropped": ("P5", SURE),
    "a release hands nothing on": ("P8", SURE),
}


def model(bounds: MessageBounds, broken: str = "") -> MessageModel:
    return MODELS[type(bounds)](bounds, broken)


@pytest.mark.campaign
@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_breaks_a_promise(scope: str):
    outcome = explore(model(SCOPES[scope]), LIMIT)
    assert not outcome.broken, outcome.way
    assert outcome.exhausted
    assert outcome.states > 15_000


@pytest.mark.parametrize("broken", BROKEN)
def test_every_part_is_needed(broken: str):
    promise, bounds = BROKEN[broken]
    outcome = explore(model(bounds, broken), LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 4 <= len(outcome.way) <= 20


def test_the_shortest_way_to_a_broken_promise_can_be_read():
    """Without a look at the clock: the grant expires while its holder does not look."""
    outcome = explore(model(NO_WRITES, "no look at the clock"), LIMIT)
    assert outcome.way[0] == "c0 asks"
    assert outcome.way.count("a tick") >= 2
    assert outcome.way[-1] == "c0 reads its token"


def test_a_search_that_did_not_end_does_not_count():
    assert explore(model(LeaseBounds()), 1000) == Outcome(1000, exhausted=False)
