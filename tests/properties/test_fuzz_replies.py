"""Kahuna and Redis may answer anything: what comes of it is an outcome of the contract, or one of its errors."""

import asyncio
import email.utils
import json
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
import redis.exceptions as driver
from contract_checks import CLAIM, JSON, ask_everything
from fuzzing import SEED_SIZE, checked, little_work, pieces
from hypothesis import example, given
from inside import TOKEN_LIMIT

from fencing_sdk._http.requests import RequestFailedError, RequestOutcome, UnreadableAnswerError
from fencing_sdk.backends import from_url
from fencing_sdk.backends.kahuna import cluster as contract
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, ReplyError
from fencing_sdk.backends.redis.errors import REFUSALS, translated
from fencing_sdk.errors import BackendError
from fencing_sdk.testing import World, WorldClient


@pytest.fixture
def host() -> Iterator[WorldClient]:
    """A process whose pauses between tries take no time."""
    with World() as world:
        yield world.client("host")


# Kahuna: JSON over HTTP.

ANSWERS = st.fixed_dictionaries(
    {"type": st.one_of(st.sampled_from(list(contract.AnswerType)).map(int), JSON)},
    optional={
        "fencingToken": st.one_of(st.integers(-1, 5), st.just(TOKEN_LIMIT), JSON),
        "owner": st.one_of(st.sampled_from(["", "AA==", "AAAA", "/w==", "MTIzAHg=", "!"]), JSON),
        "expires": st.one_of(st.fixed_dictionaries({"l": st.one_of(st.integers(0, 2**54), JSON)}), JSON),
    },
).map(lambda fields: json.dumps(fields).encode())
BODIES = st.one_of(ANSWERS, ANSWERS, JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=30))
DATES = st.one_of(
    st.none(),
    st.floats(0, 4e9).map(email.utils.formatdate),
    pieces(
        "Sat, ", "31 ", "Feb ", "0 ", "9999 ", "23:59:60 ", "24:00 ", "GMT", "-9999", "+2500", "(", ")", ":", "-", ","
    ),
)
LONG_BODIES = [
    b"[" * SEED_SIZE,
    b'{"type":' * (SEED_SIZE // 8),
    b'{"type":' + b"1" * SEED_SIZE + b"}",
    b'"' * SEED_SIZE,
]


@checked(200)
@given(body=BODIES, date=DATES, wall=st.floats(0, 4e9))
@example(body=b'{"type":4,"owner":"AAAA","fencingToken":1,"expires":{"l":1}}', date="1 Jan 0001 00:00 +0000", wall=0.0)
@example(body=b"[" * SEED_SIZE, date=None, wall=0.0)
def test_an_answer_of_kahuna_is_read_or_is_unreadable(body: bytes, date: str | None, wall: float):
    for read in (
        lambda answer: answer.token,
        lambda answer: answer.remaining(wall),
    ):
        try:
            read(contract.KahunaAnswer.read(body, date))
        except UnreadableAnswerError:
            continue


@checked(150)
@given(answers=st.lists(st.one_of(st.tuples(BODIES, DATES), st.sampled_from(RequestOutcome)), min_size=1, max_size=4))
def test_whatever_kahuna_answers_is_an_outcome_or_an_error_of_the_contract(answers):
    async def post(*_: object) -> contract.KahunaAnswer:
        post.calls += 1
        answer = answers[post.calls % len(answers)]
        if isinstance(answer, RequestOutcome):
            raise RequestFailedError(answer, "by request")
        try:
            return contract.KahunaAnswer.read(*answer)
        except UnreadableAnswerError as error:  # as the pool has it
            raise RequestFailedError(RequestOutcome.UNKNOWN, f"{error}") from error

    post.calls = 0
    backend = from_url("kahuna://one,two")
    backend._nodes.post = post

    async def story() -> None:
        await ask_everything(backend)
        await backend.aclose()

    with World() as world:
        world.client("host").run(story)


@pytest.mark.parametrize("body", LONG_BODIES, ids=lambda body: body[:9].decode())
def test_a_long_answer_of_kahuna_is_little_work(body: bytes):
    with little_work(), pytest.raises(UnreadableAnswerError):
        contract.KahunaAnswer.read(body)


# Redis: RESP3, through the shared connection.

REPLIES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 10**17),
        st.floats(),
        st.sampled_from(
            [b"", b"0", b"1", b"7", b"x", b"10", b"-1", b"1_0", b" 1", b"99999999999999999999", b"o\x001\x00=m"]
        ),
        st.binary(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.binary(max_size=2), inner, max_size=2)),
    max_leaves=4,
)
_NUMBERS = st.one_of(st.integers(-3, 5), st.just(TOKEN_LIMIT), st.floats(), st.none(), st.binary(max_size=2))
PLACES = st.lists(_NUMBERS, max_size=3) | st.lists(st.lists(_NUMBERS, max_size=3), max_size=2)
"""What looks almost like the answer of a script."""
ERRORS = st.one_of(
    st.sampled_from(
        [*REFUSALS, "LOADING", "OOM", "NOSCRIPT", "MOVED 1 h:1", "ASK 1 h:1", "EXECABORT", "", "@user_script: 1: -"]
    ),
    pieces("ERR ", "@user_script: ", " ", "-", "\r", "\n", CLAIM.owner),
).map(ReplyError)


class OnePipe:
    """Answers every command alike, at once."""

    silent_for = 0.0

    def __init__(self, reply: object) -> None:
        self._reply, self.loop = reply, asyncio.get_running_loop()

    def post(self, _packed: bytes, take: Callable[[object], None]) -> bool:
        take(self._reply)
        return True

    def close_soon(self, _why: str) -> None: ...


class OneRouter:
    """Answers every call alike; a command that needs no task, too, if it *posts*."""

    def __init__(self, reply: object, *, posts: bool) -> None:
        self._reply, self._posts = reply, posts

    def last_pipe(self, _key: str) -> OnePipe | None:
        return OnePipe(self._reply) if self._posts else None

    async def run(self, call: object) -> object:
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply

    async def run_all(self, calls: list[object]) -> list[object]:
        return [self._reply for _ in calls]


@checked(200)
@given(reply=st.one_of(PLACES, REPLIES, ERRORS, st.builds(PipeError, st.text(max_size=5))), posts=st.booleans())
@example(reply=b"not a token", posts=True)
@example(reply=[1, -1, 99999999999999999999], posts=True)
@example(reply=[99999999999999999999, -1, 1], posts=True)
@example(reply=[["x", 1]], posts=False)
@example(reply=[1], posts=True)
@example(reply=[-1, float("nan"), 1], posts=True)
def test_whatever_redis_answers_is_an_outcome_or_an_error_of_the_contract(reply: object, posts: bool):
    backend = from_url("redis://localhost")
    backend._router = OneRouter(reply, posts=posts)
    with asyncio.Runner() as runner:
        runner.run(ask_everything(backend))


@checked(200)
@given(error=st.one_of(ERRORS, st.builds(driver.ResponseError, st.text(max_size=8)), st.builds(OSError, st.integers())))
def test_every_error_is_translated(error: Exception):
    heard = translated("acquire", error)
    assert isinstance(heard, BackendError)
    assert CLAIM.owner not in f"{heard}"


# Not among them: the head of a list of a billion parts, for which hiredis makes room at once.
BYTES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(b"+OK\r\n", b"-ERR no\r\n", b":1\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*2\r\n", b"*-1\r\n", b"_\r\n"),
                *(
                    b">2\r\n",
                    b">3\r\n+invalidate\r\n",
                    b">0\r\n",
                    b"%1\r\n",
                    b"~1\r\n",
                    b",1.5\r\n",
                    b",inf\r\n",
                    b"#t\r\n",
                ),
                *(b"(123\r\n", b"!3\r\nERR\r\n", b"=7\r\ntxt:abc\r\n", b"|1\r\n", b"*1000\r\n", b"$99999\r\n"),
                *(b"%1\r\n*1\r\n:1\r\n:1\r\n", b"-\r\n", b"\r\n", b"*1\r\n" * 20),
            ]
        ),
        st.binary(max_size=4),
    ),
    max_size=8,
)


class Transport(asyncio.Transport):
    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


@checked(250)
@given(chunks=BYTES, asked=st.integers(0, 4))
@example(chunks=[b"*1\r\n" * (SEED_SIZE // 4)], asked=1)
@example(chunks=[b"$" + b"9" * SEED_SIZE], asked=1)
def test_whatever_comes_over_a_connection_settles_calls_or_closes_it(chunks: list[bytes], asked: int):
    async def story() -> None:
        pushed: list[object] = []
        pipe = Pipe(pushed.append)
        pipe.attach(Transport())
        calls = [pipe.call("PING") for _ in range(asked)]
        subscribed = pipe.subscribe("subscribe", "c")
        for chunk in chunks:
            pipe.data_received(chunk)
        pipe.close()
        for call in (*calls, subscribed):
            assert call.done()
            assert isinstance(call.exception(), PipeError | ReplyError | None)

    with little_work(), asyncio.Runner() as runner:
        runner.run(story())
