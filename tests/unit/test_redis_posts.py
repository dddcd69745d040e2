"""Acquire and release as posts: the same bytes as the full call, and what is left to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from patience import until
from redis_server import RedisServer

from fencing_sdk import BackendRefusedError, BackendUnavailableError
from fencing_sdk._values import forks
from fencing_sdk.abc import Claim, Grant, Held, Posted, Renewal, Revoked
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.connection.node import SILENCE
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, ReplyError
from fencing_sdk.backends.redis.keys import RedisKeys
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.posted_requests import RedisPosts
from fencing_sdk.backends.redis.requests import RedisRequests
from fencing_sdk.backends.redis.scripts import ScriptCall

pytest_plugins = ["redis_fixtures"]

PATIENCE = 10.0


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
    terms = {"tokens": "hybrid", "fair": True, "retention": 604800.0, "min_replicas": 0} | options
    requests = RedisRequests(keys, **terms)
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
def test_a_post_sends_the_bytes_of_the_full_call(name, metadata, ttl, prefix, tokens):
    wire = Wire()
    posts, requests = posts_on(wire, prefix, tokens=tokens)
    claim = Claim(name, ttl, metadata=metadata)
    posts.acquire(claim, print)
    posts.release(claim, print)
    assert wire.sent == [packed(requests.acquire(claim)), packed(requests.release(claim))]
    assert [followed for _, followed in wire.takes] == [True, False]


NO_SCRIPT = ReplyError("NOSCRIPT No matching script.")


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (b"34", Grant(34)),
        (1500, Held(1.5)),
        (-1, Held(None)),
        (NO_SCRIPT, Posted.NOT_EXECUTED),
        (ReplyError("MOVED 1 other:6379"), Posted.NOT_EXECUTED),
        (ReplyError("ASK 1 other:6379"), Posted.NOT_EXECUTED),
        (ReplyError("TRYAGAIN x"), Posted.NOT_EXECUTED),
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


async def test_a_late_answer_does_not_take_the_place_of_the_next_grant():
    """The waiter of that grant, which leaves the line, would give it back: it takes it for one that was not granted."""
    wire = Wire()
    posts, requests = posts_on(wire)
    first, second = Claim("a", 15.0), Claim("a", 15.0)
    posts.acquire(first, print)  # its answer comes late: a second try finds the grant
    posts.acquire(first, print)
    wire.takes[1][0](b"34")
    posts.release(first, print)
    posts.acquire(second, print)
    wire.takes[3][0](b"35")
    wire.takes[0][0](b"34")
    assert posts._losses.holds(requests.lease("a"), second)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (1, Posted.RELEASED),
        (0, Renewal.REFUSED),
        (-1, Renewal.TAKEN_OVER),
        (NO_SCRIPT, Posted.NOT_EXECUTED),
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


def test_a_server_that_is_no_master_any_more_is_left():
    wire = Wire()
    posts, _ = posts_on(wire)
    posts.acquire(Claim("a", 15.0), [].append)
    wire.takes[0][0](ReplyError("READONLY You can't write against a read only replica."))
    assert wire.closed


def test_a_request_that_is_given_up_closes_a_silent_connection_and_no_other():
    wire = Wire()
    posts, _ = posts_on(wire)
    sent = posts.acquire(Claim("a", 15.0), [].append)
    sent.give_up()
    assert not wire.closed
    wire.silent_for = SILENCE
    sent.give_up()
    assert wire.closed


def test_what_cannot_be_sent_is_left_to_the_full_call():
    posts, _ = posts_on(Wire(usable=False))
    assert posts.acquire(Claim("a", 15.0), pytest.fail) is None
    assert posts.release(Claim("a", 15.0), pytest.fail) is None


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
    assert await posted(backend.post_acquire, first) is Posted.NOT_EXECUTED  # no script is known to a new server
    grant = await backend.acquire(first)
    assert await posted(backend.post_acquire, first) == grant
    held = await posted(backend.post_acquire, second)
    assert isinstance(held, Held)
    assert 10 < held.retry_after <= 15
    assert await posted(backend.post_release, second) is Renewal.TAKEN_OVER
    assert (await backend.inspect("a")).token == grant.token
    assert await posted(backend.post_release, first) is Posted.RELEASED
    assert await backend.inspect("a") is None
    assert await posted(backend.post_release, first) is Renewal.REFUSED
    assert await backend.revoke("a", (await backend.acquire(second)).token, "why")
    assert await posted(backend.post_release, second) == Revoked("why")


async def test_without_a_connection_nothing_is_posted(backend):
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None
    await backend.open()
    await backend.aclose()
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None


async def test_a_forked_child_posts_nothing_on_the_connection_of_its_parent(backend, monkeypatch):
    await backend.open()
    monkeypatch.setattr(forks, "here", partial(int, forks.here() + 1))
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None
    monkeypatch.undo()


async def test_another_event_loop_posts_nothing_on_this_connection(backend):
    await backend.open()

    async def elsewhere() -> None:
        assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_a_connection_that_breaks_answers_every_post(backend):
    await backend.open()
    pipe = backend._router.last_pipe("a")
    assert isinstance(pipe, Pipe)
    answers = []
    for _ in range(3):
        backend.post_acquire(Claim("a", 15.0), answers.append)
    pipe.close()
    assert [type(answer) for answer in answers] == [BackendUnavailableError] * 3


async def test_where_replicas_have_to_confirm_nothing_is_posted(redis_server):
    backend = from_url(redis_server.url, min_replicas=1)
    await backend.open()
    assert backend.post_acquire(Claim("a", 15.0), pytest.fail) is None
    await backend.aclose()
