"""What Redis is asked, in full calls and in posts, and what its answers mean."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from patience import until
from redis.crc import key_slot
from redis_server import RedisServer

from fencing_sdk import BackendRefusedError, BackendUnavailableError
from fencing_sdk.abc import Busy, Claim, Grant, Renewal, Revoked
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.connection.node import SILENCE
from fencing_sdk.backends.redis.connection.pipe import PipeError, ReplyError
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.posted_requests import RedisPosts
from fencing_sdk.backends.redis.requests import (
    RedisKeys,
    RedisRequests,
    check_prefix,
    read_acquired,
    read_holder,
    read_renewals,
)
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import ConfigurationError

pytest_plugins = ["redis_fixtures"]


# What Redis is asked, what its answers mean, and what the keys of a lock are called.


TERMS = {"tokens": "hybrid", "min_replicas": 0}

names = st.text(alphabet="ab{}%:7B25Dé l", min_size=1, max_size=8)


def calls(**options) -> RedisRequests:
    return RedisRequests(RedisKeys("fencing"), **TERMS | options)


def keys_of(name: str, prefix: str = "fencing") -> list[str]:
    return list(RedisRequests(RedisKeys(prefix), **TERMS).acquire(Claim(name, 1.0)).keys)


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
    assert slots == {key_slot(found.encode()) for found in keys_of(name)}


ESCAPED = str.maketrans({"{": "%7B", "}": "%7D", "%": "%25"})


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
        *[("min_replicas", value) for value in (-1, 101, 1.0, "x", "", "-1", "²", True, None, "9" * 5000)],
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(option, value):
    with pytest.raises(ConfigurationError, match=option):
        calls(**{option: value})


def test_options_may_be_texts_as_in_a_url():
    assert calls(min_replicas="1").acquire(Claim("a", 1.0)).replicas == 1


def test_a_backend_says_nothing_of_its_secrets():
    backend = from_url("redis://user:s3cret@localhost:1?prefix=p")
    assert isinstance(backend, RedisBackend)
    assert "s3cret" not in repr(backend) + str(vars(backend)) + str(vars(backend._router))


# Answers.


@pytest.mark.parametrize("outcome", [b"1", b"111", b"", None, 11, "11", [b"1", b"1"], PipeError(), ReplyError("OOM")])
def test_without_a_whole_answer_nothing_is_known(outcome):
    assert read_renewals(outcome, 2) == [Renewal.UNKNOWN] * 2


@pytest.mark.parametrize(
    "reply", [None, b"", b"x", [], [b"34"], [b"34", b"0"], [34, 0], [b"x", 0], "34", [b"34", 0, 1]]
)
def test_what_is_no_answer_to_an_acquisition_is_refused(reply):
    with pytest.raises((TypeError, ValueError)):
        read_acquired(reply)


@pytest.mark.parametrize("label", [None, "", "m", "a\0b", "=", "é"])
def test_a_label_comes_back_as_it_was(label):
    claim = Claim("a", 1.0, label=label)
    stored = calls().acquire(claim).arguments[3]
    found = read_holder("a", [f"{claim.owner}\0{7}\0{stored}".encode(), 1500, b"0"])
    assert (found.name, found.token, found.id, found.remaining) == ("a", 7, claim.holder, 1.5)
    assert found.label == label


@pytest.mark.parametrize("lease", [b"", b"mine", b"o\0x\0", b"o\x007", b"\xff\x007\0", b"o\0\0"])
def test_what_is_no_lease_is_told_as_such(lease):
    with pytest.raises(ReplyError) as caught:
        read_holder("a", [lease, 1000, b"0"])
    assert caught.value.code == "WRONGTYPE"


# Acquire and release as posts: the same bytes as the full call, and what is left to it.


PATIENCE = 60.0


class Wire:
    """Takes the place of a connection and of the router that knows it, and keeps what is sent."""

    silent_for = 0.0

    def __init__(self, *, usable: bool = True) -> None:
        self.usable = usable
        self.sent: list[bytes] = []
        self.takes = []
        self.closed: list[str] = []

    def last_pipe(self, _key: str) -> Wire:
        return self

    def post(self, packed, take, *, followed=False):
        self.sent.append(packed)
        self.takes.append((take, followed))
        return self.usable

    def close(self, why):
        self.closed.append(why)

    close_soon = close


def posts_on(wire: Wire, prefix: str = "fencing", **options) -> tuple[RedisPosts, RedisRequests]:
    keys = RedisKeys(prefix)
    requests = RedisRequests(keys, **TERMS | options)
    return RedisPosts(keys, requests, wire, RedisLossWatcher(None), _no_reasons), requests


async def _no_reasons(claims):
    return [None] * len(claims)


def packed(call: ScriptCall) -> bytes:
    follow = hiredis.pack_command(("EXISTS", *call.follow)) if call.follow else b""
    return hiredis.pack_command(call.by_hash()) + follow


@given(
    st.text(min_size=1, max_size=20),
    st.one_of(st.none(), st.text(max_size=20)),
    st.floats(0.05, 86_400.0),
    st.sampled_from(["fencing", "%d:é", "a b"]),
    st.sampled_from(["hybrid", "counter"]),
)
@example("{a}%b%", "", 15.0, "fencing", "hybrid")
@example("\1", "\3", 987_654.321, "fencing", "hybrid")
@example("ünïcode", "é\0", 0.05, "fencing", "hybrid")
def test_a_post_sends_the_bytes_of_the_full_call(name, label, ttl, prefix, tokens):
    wire = Wire()
    posts, requests = posts_on(wire, prefix, tokens=tokens)
    claim = Claim(name, ttl, label=label)
    posts.acquire(claim, print)
    posts.release(claim, print)
    assert wire.sent == [packed(requests.acquire(claim)), packed(requests.release(claim))]
    assert [followed for _, followed in wire.takes] == [True, False]


NO_SCRIPT = ReplyError("NOSCRIPT No matching script.")


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (b"34", Grant(34)),
        (1500, Busy(1.5)),
        (-1, Busy(None)),
        (NO_SCRIPT, PostOutcome.NOT_EXECUTED),
        (ReplyError("MOVED 1 other:6379"), PostOutcome.NOT_EXECUTED),
        (ReplyError("ASK 1 other:6379"), PostOutcome.NOT_EXECUTED),
        (ReplyError("TRYAGAIN x"), PostOutcome.NOT_EXECUTED),
        (ReplyError("OOM no"), BackendUnavailableError),
        (ReplyError("NOPERM no"), BackendRefusedError),
        (PipeError("broke"), BackendUnavailableError),
        (b"thirty-four", BackendUnavailableError),
        (b"9007199254740992", BackendUnavailableError),
        (["x", 0], BackendUnavailableError),
    ],
    ids=repr,
)
def test_what_a_reply_to_an_acquisition_means(reply, outcome):
    wire, answers = Wire(), []
    posts, _ = posts_on(wire)
    posts.acquire(Claim("a", 15.0), answers.append)
    wire.takes[0][0](reply)
    (answer,) = answers
    assert type(answer) is outcome if isinstance(outcome, type) else answer == outcome


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (1, PostOutcome.RELEASED),
        (0, Renewal.REFUSED),
        (-1, Renewal.TAKEN_OVER),
        (NO_SCRIPT, PostOutcome.NOT_EXECUTED),
        (PipeError("broke"), None),
    ],
    ids=repr,
)
async def test_what_a_reply_to_a_release_means(reply, outcome):
    wire, answers = Wire(), []
    posts, _ = posts_on(wire)
    posts.release(Claim("a", 15.0), answers.append)
    wire.takes[0][0](reply)
    await until(lambda: answers)  # a refusal is told when the server was asked for the reason
    assert answers == [outcome] if outcome else isinstance(answers[0], BackendUnavailableError)


def test_a_request_that_is_given_up_closes_a_silent_connection_and_no_other():
    wire = Wire()
    posts, _ = posts_on(wire)
    sent = posts.acquire(Claim("a", 15.0), [].append)
    sent.give_up()
    assert not wire.closed
    wire.silent_for = SILENCE
    sent.give_up()
    assert wire.closed


# On a real server.


@pytest.fixture
async def backend(redis_server: RedisServer) -> AsyncIterator[RedisBackend]:
    backend = from_url(redis_server.url)
    yield backend
    await backend.aclose()


async def posted(post, claim: Claim) -> object:
    answer = asyncio.get_running_loop().create_future()
    assert post(claim, answer.set_result) is not None
    async with asyncio.timeout(PATIENCE):
        return await answer


@pytest.mark.every_loop
async def test_posts_of_a_real_server_are_answered(backend):
    await backend.open()
    first, second = Claim("a", 15.0), Claim("a", 15.0)
    assert await posted(backend.post_acquire, first) is PostOutcome.NOT_EXECUTED  # no script is known to a new server
    grant = await backend.acquire(first)
    assert await posted(backend.post_acquire, first) == grant
    held = await posted(backend.post_acquire, second)
    assert isinstance(held, Busy)
    assert 10 < held.retry_after <= 15
    assert await posted(backend.post_release, second) is Renewal.TAKEN_OVER
    assert (await backend.inspect("a")).token == grant.token
    assert await posted(backend.post_release, first) is PostOutcome.RELEASED
    assert await backend.inspect("a") is None
    assert await posted(backend.post_release, first) is Renewal.REFUSED
    assert await backend.revoke("a", (await backend.acquire(second)).token, "why")
    assert await posted(backend.post_release, second) == Revoked("why")


async def test_a_forked_child_posts_nothing_on_the_connection_of_its_parent(backend, monkeypatch):
    await backend.open()
    monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None
    monkeypatch.undo()


async def test_where_replicas_have_to_confirm_nothing_is_posted(redis_server):
    backend = from_url(redis_server.url, min_replicas=1)
    await backend.open()
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None
    await backend.aclose()
