"""What Redis is asked, in full calls and in packed commands, and what its answers mean."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot
from redis_server import RedisServer

from fencing_sdk import BackendRefusedError, BackendUnavailableError
from fencing_sdk._values.answer import Answer
from fencing_sdk.abc import HELD, LOCK, READER, Busy, Claim, Gone, Permit, Place
from fencing_sdk.backends.redis import RedisBackend, from_url, read_answer
from fencing_sdk.backends.redis.connection.node import SILENCE
from fencing_sdk.backends.redis.connection.pipe import PipeError, ReplyError, pack
from fencing_sdk.backends.redis.keys import RedisKeys, check_prefix
from fencing_sdk.errors import ConfigurationError

pytest_plugins = ["redis_fixtures"]


# What Redis is asked, what its answers mean, and what the keys of a lock are called.


names = st.text(alphabet="ab{}%:7B25Dé l", min_size=1, max_size=8)


def keys_of(name: str) -> list[str]:
    return list(from_url("redis://localhost")._at(name))


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
        from_url("redis://localhost", **{option: value})


def test_options_may_be_texts_as_in_a_url():
    assert from_url("redis://localhost?min_replicas=1")._replicas == 1


def test_a_backend_says_nothing_of_its_secrets():
    backend = from_url("redis://user:s3cret@localhost:1?prefix=p")
    assert isinstance(backend, RedisBackend)
    assert "s3cret" not in repr(backend) + str(vars(backend)) + str(vars(backend._router))


# Answers.


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ([7, -1, 3], Place(7, None, 3)),
        ([7, 0, 3], Place(7, 0, 3)),
        ([-1, 1500, 3], Place(None, None, 3, None, 1.5)),
        ([-1, -1, 3], Place(None, None, 3, None, math.inf)),
        ([-2, 1], Gone(None, taken=True)),
        ([-2, 0, "why é".encode()], Gone("why é", taken=False)),
        ([-3, 1500], Busy(1.5)),
        ([-4], HELD),
    ],
)
def test_what_an_answer_means(reply, answer):
    assert read_answer(reply, Place, Gone, Busy) == answer


@pytest.mark.parametrize(
    "reply", [None, b"", 34, [], [34], [b"34", 0, 1], [34, 0, b"x"], [-5, 1, 1], "34", [34, 0, 1, 2]]
)
def test_what_is_no_answer_is_refused(reply):
    with pytest.raises((TypeError, ValueError)):
        read_answer(reply, Place, Gone, Busy)


# Draw and give back in packed commands: the same bytes as the full call, and what is left to it.


class Wire:
    """Takes the place of a connection and of the router that knows it, and keeps what is sent."""

    silent_for = 0.0

    def __init__(self, loop) -> None:
        self.loop = loop
        self.sent: list[bytes] = []
        self.takes = []
        self.closed: list[str] = []

    def last_pipe(self, _key: str) -> Wire:
        return self

    def post(self, packed, take):
        self.sent.append(packed)
        self.takes.append(take)
        return True

    def close(self, why):
        self.closed.append(why)

    close_soon = close


class Loop:
    """Takes the place of a loop in answers that are not awaited."""

    def get_debug(self) -> bool:
        return False

    def call_soon(self, *_args, **_options) -> None:
        pass

    def call_exception_handler(self, _context) -> None:
        pass


def on_wire(**options) -> tuple[RedisBackend, Wire]:
    backend, wire = from_url("redis://localhost", **options), Wire(Loop())
    backend._router = backend._bells.router = wire
    backend._bells.holds = lambda _: None
    return backend, wire


@given(
    st.text(min_size=1, max_size=20),
    st.one_of(st.none(), st.text(max_size=20)),
    st.floats(0.05, 86_400.0),
    st.sampled_from(["fencing", "%d:é", "a b"]),
    st.sampled_from(["hybrid", "counter"]),
    st.sampled_from([LOCK, READER, Permit(3)]),
    st.booleans(),
)
@example("{a}%b%", "", 15.0, "fencing", "hybrid", LOCK, False)
@example("ünïcode", "é", 0.05, "fencing", "hybrid", LOCK, True)
def test_a_packed_command_has_the_bytes_of_the_full_call(name, label, ttl, prefix, tokens, mode, only):
    backend, wire = on_wire(prefix=prefix, tokens=tokens)
    claim = Claim(name, ttl, label=label, mode=mode)
    backend.draw(claim, only_if_it_holds=only)
    backend.give_back(claim)
    full = [backend._draw_call(claim, only=only), backend._give_back_call(claim, 0.0)]
    assert wire.sent == [pack(call.by_hash()) for call in full]


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ([34, -1, 1], Place(34, None, 1)),
        ([-3, 1500], Busy(1.5)),
        (ReplyError("OOM no"), BackendUnavailableError),
        (ReplyError("NOPERM no"), BackendRefusedError),
        (PipeError("broke"), BackendUnavailableError),
        (b"thirty-four", BackendUnavailableError),
        ([-2, 0], BackendUnavailableError),
        (["x", 0], BackendUnavailableError),
    ],
    ids=repr,
)
def test_what_a_reply_to_a_draw_means(reply, outcome):
    backend, wire = on_wire()
    answer = backend.draw(Claim("a", 15.0))
    wire.takes[0](reply)
    if isinstance(outcome, type):
        assert type(answer.exception()) is outcome
    else:
        assert answer.result() == outcome


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [([1], None), ([-2, 0], Gone()), ([-2, 1, b"why"], Gone("why", taken=True)), (PipeError("broke"), 0)],
)
def test_what_a_reply_to_a_give_back_means(reply, outcome):
    backend, wire = on_wire()
    answer = backend.give_back(Claim("a", 15.0))
    wire.takes[0](reply)
    if outcome == 0:
        assert isinstance(answer.exception(), BackendUnavailableError)
    else:
        assert answer.result() == outcome


def test_a_request_that_is_given_up_closes_a_silent_connection_and_no_other():
    backend, wire = on_wire()
    backend.draw(Claim("a", 15.0)).cancel()
    assert not wire.closed
    wire.silent_for = SILENCE
    backend.draw(Claim("a", 15.0)).cancel()
    assert wire.closed


# On a real server.


@pytest.fixture
async def backend(redis_server: RedisServer) -> AsyncIterator[RedisBackend]:
    backend = from_url(redis_server.url)
    await backend.open()
    yield backend
    await backend.aclose()


@pytest.mark.every_loop
async def test_a_server_that_forgot_the_scripts_answers_all_the_same(backend, redis_server):
    first, second = Claim("a", 15.0), Claim("a", 15.0)
    await redis_server.command("SCRIPT", "FLUSH")
    drawn = backend.draw(first)
    assert isinstance(drawn, Answer)
    place = await drawn
    assert await backend.draw(first) == place
    assert isinstance(await backend.draw(second, only_if_it_holds=True), Busy)
    await redis_server.command("SCRIPT", "FLUSH")
    assert await backend.give_back(second) == Gone(taken=True)
    await redis_server.command("SCRIPT", "FLUSH")
    assert await backend.give_back(first) is None


async def test_closing_ends_an_answer_that_is_on_its_way(backend, redis_server):
    await redis_server.command("SCRIPT", "FLUSH")
    redis_server.pause()
    answer = backend.draw(Claim("a", 15.0))
    await backend.aclose()
    redis_server.resume()
    with pytest.raises(BackendUnavailableError):
        await answer


async def test_a_forked_child_posts_nothing_on_the_connection_of_its_parent(backend, monkeypatch):
    monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))
    drawn = backend.draw(Claim("a", 15.0))
    assert not isinstance(drawn, Answer)
    drawn.close()
    monkeypatch.undo()


async def test_where_replicas_have_to_confirm_nothing_is_posted(redis_server):
    backend = from_url(redis_server.url, min_replicas=1)
    await backend.open()
    drawn = backend.draw(Claim("a", 15.0))
    assert not isinstance(drawn, Answer)
    drawn.close()
    await backend.aclose()
