"""What travels to a store and back: tokens that are ints, claims that hide their owner."""

import copy
import dataclasses
import json
import pickle
import re
import sqlite3
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencing_sdk import Token
from fencing_sdk._values.claim import (
    LOCK,
    READER,
    TOKEN_LIMIT,
    WRITER,
    Claim,
    Grant,
    Held,
    Holder,
    Permit,
    Renewal,
    holder_of,
)

values = st.integers(0, TOKEN_LIMIT - 1)


@settings(deadline=None)
@given(values, values)
def test_a_token_behaves_as_the_int_it_is(one, other):
    token = Token(one, "9f8a01c2")
    assert token == one
    assert hash(token) == hash(one)
    assert (token < other, token > other, token == other) == (one < other, one > other, one == other)
    assert {one: "found"}[token] == "found"
    assert (str(token), repr(token), f"{token}", f"{token:d}") == (str(one),) * 4
    assert token + 1 == one + 1
    assert bool(token) == bool(one)
    assert isinstance(token, int)


def test_arithmetic_makes_a_plain_int_without_a_holder():
    token = Token(34, "9f8a01c2")
    for number in (token + 1, token - 0, max(token + 0, 1), int(token)):
        assert type(number) is int


def test_equality_looks_at_the_number_alone():
    assert Token(34, "aaaa") == Token(34, "bbbb") == Token(34) == 34
    assert len({Token(34, "aaaa"), Token(34, "bbbb"), 34}) == 1


@pytest.mark.parametrize("holder", [None, "9f8a01c2"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_token_keeps_its_holder_when_pickled(holder, protocol):
    back = pickle.loads(pickle.dumps(Token(34, holder), protocol))
    assert type(back) is Token
    assert (int(back), back.holder) == (34, holder)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_token_keeps_its_holder_when_copied(twin):
    back = twin(Token(34, "9f8a01c2"))
    assert (type(back), int(back), back.holder) == (Token, 34, "9f8a01c2")


def test_a_token_is_a_number_in_json_and_in_sql():
    token = Token(TOKEN_LIMIT - 1, "9f8a01c2")
    assert json.dumps({"token": token}) == '{"token": 9007199254740991}'
    with sqlite3.connect(":memory:") as connection:
        (row,) = connection.execute("SELECT ?, typeof(?)", (token, token))
    connection.close()
    assert row == (TOKEN_LIMIT - 1, "integer")


def test_the_largest_token_is_exact_as_a_double():
    assert int(float(TOKEN_LIMIT - 1)) == TOKEN_LIMIT - 1
    assert float(TOKEN_LIMIT) == float(TOKEN_LIMIT + 1)  # why it stops there


def test_a_token_knows_no_holder_unless_it_was_told():
    assert Token(34).holder is None
    assert Token(Token(34, "9f8a01c2")).holder is None


@pytest.mark.parametrize("value", ["34", " 34", "\u0663", b"34", 3.7, None, [34]], ids=ascii)
def test_a_token_is_made_from_an_int_alone(value):
    """int() would read the first four and cut the fifth to 3."""
    with pytest.raises(TypeError):
        Token(value)


def test_the_holder_is_a_short_digest_that_does_not_tell_the_owner():
    owner = "0123456789abcdef" * 2
    assert holder_of(owner) == "3eb1bd43"  # the same in every version: it is stored beside fences
    assert holder_of(owner) not in owner
    assert holder_of(owner) == holder_of(owner) != holder_of(owner[::-1])
    assert Claim("a", 1.0, owner).holder == holder_of(owner)


def test_every_claim_has_an_owner_of_its_own_of_128_bits():
    owners = {Claim("a", 15.0).owner for _ in range(1000)}
    assert len(owners) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", owner) for owner in owners)
    for place in range(32):
        assert len({owner[place] for owner in owners}) == 16, "a digit that is not random"


def test_a_claim_does_not_show_its_owner():
    claim = Claim("seats/42", 15.0, metadata="worker-1")
    for text in (repr(claim), str(claim), f"{claim}", f"{[claim]}", repr({"claim": claim})):
        assert claim.owner not in text
        assert "seats/42" in text


def test_retries_use_one_claim_and_another_ttl_keeps_the_owner():
    claim = Claim("seats/42", 15.0)
    assert dataclasses.replace(claim, ttl=5.0).owner == claim.owner
    assert claim != Claim("seats/42", 15.0)
    assert claim == pickle.loads(pickle.dumps(claim))


@pytest.mark.parametrize("value", [Claim("a", 1.0), Grant(34), Held(), Holder("a", 34, "9f8a01c2", 1.0)], ids=repr)
def test_values_cannot_be_changed(value):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, "other")
    assert not hasattr(value, "__dict__")


def test_a_store_may_add_to_what_a_grant_tells():
    @dataclass(frozen=True, slots=True)
    class Dated(Grant):
        revision: int = 0

    assert Dated(5, revision=7) == Dated(5, None, True, None, 7)


def test_a_grant_restarts_the_ttl_unless_the_store_says_otherwise():
    assert Grant(0) == Grant(0, ttl=None, restarted=True)


def test_the_outcomes_of_a_renewal():
    assert [outcome.name for outcome in Renewal] == ["RENEWED", "REFUSED", "TAKEN_OVER", "UNKNOWN"]
    assert all(pickle.loads(pickle.dumps(outcome)) is outcome for outcome in Renewal)


def test_a_claim_wants_the_name_for_itself_unless_it_says_otherwise():
    assert Claim("a", 1.0).mode is LOCK
    assert [mode.shared for mode in (LOCK, WRITER, READER, Permit(of=4))] == [False, False, True, True]
    assert Permit(of=4) == Permit(of=4) != Permit(of=5)
    assert Permit(of=4).word == "permit"


def test_readers_that_hold_together_are_one_holder_to_a_guard():
    one, other = (Claim("a", 1.0, mode=READER) for _ in range(2))
    assert one.token_holder(7) == other.token_holder(7)
    assert one.holder != other.holder
    assert one.token_holder(7) != one.token_holder(8)
    assert one.token_holder(7) != Claim("b", 1.0, mode=READER).token_holder(7)
    assert Claim("a", 1.0, one.owner).token_holder(7) == one.holder
