"""Tokens of a quorum never repeat and never fall in any history of small models, which notice a missing rule."""

from __future__ import annotations

import pytest
from quorum_model import ConfirmsNothing, Model
from quorum_renewal_model import CountsAtOnce, RenewalModel
from quorum_revocation_model import CountsAnyFreeNode, FirstSomewhere, RevocationModel

SAFE = {
    "two attempts": Model(vanishings=3),
    "numbers that differ": Model(counters=(0, 1, 2), vanishings=2),
    "hints": Model(counters=(0, 1, 2), hints=(0, 3), vanishings=2),
    "a request that is delivered twice": Model(deliveries=(2, 1, 1), vanishings=3),
    "a node that loses its memory": Model(counters=(0, 1, 2), losses=1, vanishings=1),
}

BROKEN = {
    "no CONFIRM": (Model(ballot=ConfirmsNothing), "duplicate token"),
    "CONFIRM compares the owner alone": (Model(deliveries=(2, 1, 1), vanishings=3, compares_number=False), "token"),
    "no epoch": (Model(losses=1, epochs=False), "duplicate token"),
    "numbers that fall": (Model(losses=1, counter_survives=True), "duplicate token"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAFE)
def test_no_history_repeats_a_token_or_lets_it_fall(name: str):
    assert SAFE[name].violation() is None


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_notices_when_a_rule_is_missing(name: str):
    model, promise = BROKEN[name]
    assert promise in (model.violation() or "nothing")


def test_a_round_of_renewals_proves_that_no_rival_had_the_lock_before_it_began():
    assert RenewalModel().violation() is None


def test_a_healed_node_that_counts_at_once_hides_a_rival():
    assert "rival had the lock" in (RenewalModel(hold=CountsAtOnce).violation() or "nothing")


OPERATED = {
    "a holder that renews and heals": RevocationModel(),
    "two operators": RevocationModel(operators=2, rounds=0, heals=0),
}

OPERATED_WRONGLY = {
    "a node that never had the grant counts": (RevocationModel(tally=CountsAnyFreeNode), "had been revoked"),
    "a node is healed that was told of the revocation": (RevocationModel(heals_what_was_revoked=True), "been revoked"),
    "each operator was the first somewhere": (
        RevocationModel(operators=2, rounds=0, heals=0, tally=FirstSomewhere),
        "two operators",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATED)
def test_no_history_goes_on_with_a_grant_that_was_revoked(name: str):
    assert OPERATED[name].violation() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATED_WRONGLY)
def test_the_model_notices_a_revocation_that_proves_too_little(name: str):
    model, promise = OPERATED_WRONGLY[name]
    assert promise in (model.violation() or "nothing")
