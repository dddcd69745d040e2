"""The direct grant in every state it can reach, within small bounds; and what breaks without each of its parts."""

import pytest
from campaigns import amount
from grant_model import GrantBounds, GrantModel
from state_search import explore

LIMIT = 400_000
SCOPES = {
    "with loss": GrantBounds(time=amount(4, short=2)),
    "with renewals": GrantBounds(time=amount(4, short=2), renewals=True),
    "without loss": GrantBounds(time=amount(3, short=2), messages=3, loss=False),
}
SURE, LOSSY = GrantBounds(loss=False, messages=3), GrantBounds()
BROKEN = {
    "a grant is told before it is made": ("P1", SURE),
    "a grant counts from its message": ("P1", SURE),
    "a grant counts from the latest sign": ("P1", LOSSY),
    "an offer is shorter than the ttl": ("P1", SURE),
    "a grant is repeated without a fresh ttl": ("P1", LOSSY),
    "an old message gives back a new grant": ("P1", SURE),
    "a waiter gives up without a release": ("P5", SURE),
    "a message for one that has left is dropped": ("P5", SURE),
    "a release hands nothing on": ("P8", SURE),
}


@pytest.mark.campaign
@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_of_a_direct_grant_breaks_a_promise(scope: str):
    outcome = explore(GrantModel(SCOPES[scope]), LIMIT)
    assert not outcome.broken, outcome.way
    assert outcome.exhausted
    assert outcome.states > 2_000


@pytest.mark.parametrize("broken", BROKEN)
def test_every_part_of_a_direct_grant_is_needed(broken: str):
    promise, bounds = BROKEN[broken]
    outcome = explore(GrantModel(bounds, broken), LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 4 <= len(outcome.way) <= 20
