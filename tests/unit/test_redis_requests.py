"""What Redis is asked, what its answers mean, and what the keys of a lock are called."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.backends.redis import RedisBackend, from_url, scripts
from fencing_sdk.backends.redis.answers import read_holder, read_line, read_refusal, read_renewals
from fencing_sdk.backends.redis.connection.cluster import slot_of
from fencing_sdk.backends.redis.connection.pipe import PipeError, ReplyError
from fencing_sdk.backends.redis.keys import RedisKeys, check_prefix, lease_key, line_keys, token_key
from fencing_sdk.backends.redis.requests import RedisRequests, WaiterSign, milliseconds
from fencing_sdk.errors import ConfigurationError

TERMS = {"tokens": "hybrid", "fair": True, "retention": 604800.0, "min_replicas": 0}

names = st.text(alphabet="ab{}%:7B25Dé l", min_size=1, max_size=8)


def calls(**options) -> RedisRequests:
    return RedisRequests(RedisKeys("fencing"), **TERMS | options)


def keys_of(name: str, prefix: str = "fencing") -> list[str]:
    tag = RedisKeys(prefix).tag(name)
    return [lease_key(tag), token_key(tag), *line_keys(tag)]


# Keys.


@given(names, names)
@example("a{", "a%7B")
@example("a%7B", "a%257B")
def test_two_names_never_share_a_key(one, other):
    assert (set(keys_of(one)) & set(keys_of(other)) == set()) is (one != other)


@given(names)
@example("}")
@example("{}")
@example("}{")
def test_all_keys_of_a_lock_are_in_one_slot_and_slots_differ(name):
    slots = {key_slot(found.encode()) for found in keys_of(name)}
    assert slots == {key_slot(f"fencing:{name.translate(ESCAPED)}".encode())}
    assert slots == {slot_of(found.encode()) for found in keys_of(name)}


ESCAPED = str.maketrans({"{": "%7B", "}": "%7D", "%": "%25"})


def test_locks_spread_over_the_slots_of_a_cluster():
    assert len({slot_of(keys_of(f"n{number}")[0].encode()) for number in range(1000)}) > 900


@pytest.mark.parametrize("prefix", ["", "{", "a}", "a{b}c", "x" * 513, "a\nb", 3, None, b"a"])
def test_a_prefix_that_cannot_begin_keys_is_refused(prefix):
    with pytest.raises(ConfigurationError, match="prefix"):
        check_prefix(prefix)


def test_the_channel_of_a_client_is_covered_by_the_rule_for_the_prefix_and_is_no_lock():
    channel = RedisKeys("fencing").wake_channel("c")
    assert channel.startswith("{fencing")
    assert channel not in {found for name in ("c", "wake:c", "}:wake:c") for found in keys_of(name)}


# Options.


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("tokens", value) for value in ("", "Hybrid", None, 1, b"hybrid")],
        *[("fair", value) for value in ("perhaps", None, 2, 1.0, "", b"true")],
        *[("retention", value) for value in (0, 0.9, -1, math.inf, math.nan, "x", None, True, 1e12, [])],
        *[("min_replicas", value) for value in (-1, 101, 1.0, "x", "", "-1", "²", True, None, "9" * 5000)],
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(option, value):
    with pytest.raises(ConfigurationError, match=option):
        calls(**{option: value})


@pytest.mark.parametrize(("text", "word"), [("true", "fair"), ("Yes", "fair"), ("0", "barge"), ("NO", "barge")])
def test_options_may_be_texts_as_in_a_url(text, word):
    made = calls(fair=text, retention="2.5", min_replicas="1").acquire(Claim("a", 1.0))
    assert made.arguments[-1] == word
    assert made.arguments[-2] == 2500
    assert made.replicas == 1


def test_a_plain_counter_is_never_forgotten():
    assert calls(tokens="counter", retention=5).acquire(Claim("a", 1.0)).arguments[3:5] == ("counter", 0)


def test_a_backend_says_nothing_of_its_secrets():
    backend = from_url("redis://user:s3cret@localhost:1?prefix=p")
    assert isinstance(backend, RedisBackend)
    assert "s3cret" not in repr(backend) + str(vars(backend)) + str(vars(backend._router))


# Questions.


@given(st.floats(min_value=0.05, max_value=86400.0))
def test_a_store_keeps_a_grant_for_at_least_as_long_as_was_asked(ttl):
    assert ttl * 1000 <= milliseconds(ttl) < ttl * 1000 + 1


def test_many_leases_are_renewed_by_one_run_each_with_its_own_ttl():
    claims = [Claim("a", 1.0), Claim("b", 2.5)]
    call = calls().renew(claims)
    assert list(call.keys) == [keys_of("a")[0], keys_of("b")[0]]
    assert list(call.arguments) == [claims[0].owner, 1000, claims[1].owner, 2500]


def test_a_call_says_the_same_by_hash_and_by_text():
    call = calls().acquire(Claim("a", 1.0, metadata="m"))
    assert call.by_hash()[1:2] == (scripts.ACQUIRE.sha,)
    assert call.by_text()[1:2] == (scripts.ACQUIRE.text,)
    assert call.by_hash()[2:] == call.by_text()[2:]
    assert call.by_hash()[2] == len(call.keys) == 4


def test_no_two_scripts_are_the_same():
    all_scripts = [scripts.ACQUIRE, scripts.RENEW, scripts.RELEASE, scripts.INSPECT, scripts.STAND]
    assert len({script.sha for script in all_scripts}) == len(all_scripts)


# Answers.


def test_each_renewal_has_its_own_outcome():
    assert read_renewals(b"10x", 3) == [Renewal.RENEWED, Renewal.REFUSED, Renewal.TAKEN_OVER]


@pytest.mark.parametrize("outcome", [b"1", b"111", b"", None, 11, "11", [b"1", b"1"], PipeError(), ReplyError("OOM")])
def test_without_a_whole_answer_nothing_is_known(outcome):
    assert read_renewals(outcome, 2) == [Renewal.UNKNOWN] * 2


def test_what_a_server_should_not_say_is_unknown():
    assert read_renewals(b"1?", 2) == [Renewal.RENEWED, Renewal.UNKNOWN]


@pytest.mark.parametrize(("reply", "left"), [(1500, 1.5), (0, 0.0), (-1, None), (-2, None)])
def test_a_refusal_tells_how_long(reply, left):
    assert read_refusal(reply) == left


@pytest.mark.parametrize(
    ("reply", "answer"),
    [([1500, 0, b""], (1.5, 0, None)), ([-2, 2, b""], (None, 2, None)), ([60, 1, b"34"], (0.06, 1, 34))],
)
def test_an_answer_to_signs_of_life_tells_whose_turn_it_is(reply, answer):
    assert read_line(reply) == answer


@pytest.mark.parametrize(
    "reply", [None, b"1", 3, [], [1, 2], [1, b"x", b""], [1, 1, b"x"], ["1", 1, b""], [1, None, b""]]
)
def test_what_is_no_answer_to_a_sign_of_life_is_refused(reply):
    with pytest.raises((TypeError, ValueError)):
        read_line(reply)


def test_a_sign_of_life_keeps_what_a_grant_needs_apart_from_what_a_name_may_have():
    claim = Claim("a b", 1.5, metadata="m\0 1 2")
    stored = WaiterSign(claim, "direct", 123, "7", "SPUBLISH", "{fencing:a b}:wake:c").stored()
    assert stored == "direct 123 1500 7 SPUBLISH {fencing:a b}:wake:c\0=m\0 1 2"


@pytest.mark.parametrize("metadata", [None, "", "m", "a\0b", "=", "é"])
def test_metadata_comes_back_as_it_was(metadata):
    claim = Claim("a", 1.0, metadata=metadata)
    stored = calls().acquire(claim).arguments[2]
    found = read_holder("a", [f"{claim.owner}\0{7}\0{stored}".encode(), 1500, b"0"])
    assert (found.name, found.token, found.holder, found.remaining) == ("a", 7, claim.holder, 1.5)
    assert found.metadata == metadata


def test_a_lease_without_a_ttl_lasts_for_ever():
    assert read_holder("a", [b"o\x007\0", -1, b"0"]).remaining == math.inf


def test_nobody_holds_a_free_lock():
    assert read_holder("a", None) is None


@pytest.mark.parametrize("lease", [b"", b"mine", b"o\0x\0", b"o\x007", b"\xff\x007\0", b"o\0\0"])
def test_what_is_no_lease_is_told_as_such(lease):
    with pytest.raises(ReplyError) as caught:
        read_holder("a", [lease, 1000, b"0"])
    assert caught.value.code == "WRONGTYPE"
