"""Members of etcd, and proxies before them, may answer anything: it is an outcome of the contract, or an error."""

import asyncio
import contextlib
import json
from base64 import b64encode

import hypothesis.strategies as st
import pytest
from contract_checks import CLAIM, JSON, ask_everything
from fuzzing import SEED_SIZE, checked, little_work
from hypothesis import example, given
from inside import TOKEN_LIMIT

from fencing_sdk._etcd import read_answer
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome, UnreadableAnswerError
from fencing_sdk.abc import Place
from fencing_sdk.backends import from_url
from fencing_sdk.backends.etcd.keys import EtcdKeys

OWN = b64encode(EtcdKeys("fencing/").own(CLAIM)).decode()
VALUE = b64encode(b'{"label":null}').decode()

NUMBERS = st.one_of(
    st.integers(-1, 5).map(str),
    st.sampled_from([str(TOKEN_LIMIT), str(2**63 - 1), "-1", "1_0", " 1", "", "x", 7]),
    JSON,
)
HEADERS = st.fixed_dictionaries({}, optional={"revision": NUMBERS}) | JSON
KEYS = (
    st.fixed_dictionaries(
        {"key": st.sampled_from([OWN, "YQ==", "!"]), "create_revision": NUMBERS, "mod_revision": NUMBERS},
        optional={"value": st.sampled_from([VALUE, "e30=", "NQ==", "/w=="]) | JSON, "lease": NUMBERS},
    )
    | JSON
)
RANGES = st.fixed_dictionaries({}, optional={"header": HEADERS, "kvs": st.lists(KEYS, max_size=2) | JSON})
RESPONSES = st.lists(st.fixed_dictionaries({"response_range": RANGES}) | JSON, max_size=4) | JSON
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "header": HEADERS,
        "succeeded": st.booleans() | JSON,
        "responses": RESPONSES,
        "kvs": st.lists(KEYS, max_size=2) | JSON,
        "ID": NUMBERS,
        "TTL": NUMBERS,
        "result": RANGES | JSON,
        "error": st.fixed_dictionaries({"grpc_code": st.integers(0, 17), "message": st.text(max_size=3)}) | JSON,
        "code": st.integers(0, 17) | JSON,
        "message": st.sampled_from(["no", "\n", ""]) | JSON,
    },
)
LIKELY = st.fixed_dictionaries(
    {
        "header": st.just({"revision": "7"}),
        "succeeded": st.booleans(),
        "responses": st.lists(st.fixed_dictionaries({"response_range": RANGES}), min_size=2, max_size=4),
        "kvs": st.lists(KEYS, max_size=2),
        "ID": st.just("9"),
        "TTL": st.sampled_from(["11", "0", "-1", "1"]),
    }
)
BODIES = st.one_of(
    LIKELY.map(json.dumps).map(str.encode), FIELDS.map(json.dumps).map(str.encode), st.binary(max_size=20)
)
STATUSES = st.sampled_from([200, 200, 200, 200, 301, 400, 404, 408, 429, 500, 503])


def answered(*answers: tuple[bytes, int] | RequestOutcome):
    """A backend whose members give these answers, one after the other, again and again."""
    backend = from_url("etcd://one,two")
    given = 0

    async def post(*_: object) -> dict[str, object]:
        nonlocal given
        given += 1
        answer = answers[given % len(answers)]
        if isinstance(answer, RequestOutcome):
            raise RequestFailedError(answer, "by request")
        try:
            return read_answer(*answer)
        except UnreadableAnswerError as error:  # as the gateway has it
            raise RequestFailedError(RequestOutcome.UNKNOWN, f"{error}") from error

    backend._gateway._post = post
    return backend


def with_ttl(ttl: object) -> tuple[bytes, int]:
    return json.dumps({"header": {"revision": "7"}, "succeeded": True, "ID": "9", "TTL": ttl}).encode(), 200


@checked(250)
@given(answers=st.lists(st.tuples(BODIES, STATUSES) | st.sampled_from(RequestOutcome), min_size=1, max_size=4))
@example(answers=[with_ttl("11")])
@example(answers=[with_ttl("9" * 400)])
@example(answers=[with_ttl("9" * 5000)])
@example(answers=[with_ttl(10**400)])
@example(answers=[with_ttl(1e400)])
@example(answers=[(b'{"error":5}', 200)])
@example(answers=[(b'{"code":5,"message":"Not Found","details":[]}', 404)])
@example(answers=[(b'{"header":5,"succeeded":true,"ID":"9","TTL":"11"}', 200)])
def test_whatever_etcd_answers_is_an_outcome_or_an_error_of_the_contract(answers):
    async def story() -> None:
        backend = answered(*answers)
        await ask_everything(backend)
        await backend.aclose()

    with asyncio.Runner() as runner:
        runner.run(story())


def test_these_answers_are_not_refused_one_and_all():
    """What is fuzzed above gets as far as a grant."""

    async def story() -> object:
        backend = answered(with_ttl("11"))
        try:
            return await backend.draw(CLAIM, only_if_it_holds=True)
        finally:
            await backend.aclose()

    assert asyncio.run(story()) == Place(7, None, 7)


@checked(200)
@given(body=BODIES, status=STATUSES)
def test_a_line_is_fields_or_an_error(body: bytes, status: int):
    with contextlib.suppress(RequestFailedError, UnreadableAnswerError):
        assert isinstance(read_answer(body, status), dict)


@pytest.mark.parametrize(
    "body",
    [b"[" * SEED_SIZE, b'{"ID":' * (SEED_SIZE // 6), b'{"ID":' + b"1" * SEED_SIZE + b"}", b'"' * SEED_SIZE],
    ids=lambda body: body[:9].decode(),
)
def test_a_long_answer_is_little_work(body: bytes):
    with little_work(), contextlib.suppress(UnreadableAnswerError, RequestFailedError):
        read_answer(body, 200)


EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["DELETE", "DELETE", "PUT"]) | JSON,
        "kv": st.fixed_dictionaries(
            {"key": st.sampled_from([OWN, OWN, "YQ==", "!"])}, optional={"mod_revision": NUMBERS}
        )
        | JSON,
    },
)
WATCHED = st.fixed_dictionaries(
    {"watch_id": st.just("1")},
    optional={
        "events": st.lists(EVENTS | JSON, max_size=3) | JSON,
        "canceled": st.just(value=False) | JSON,
    },
)


@checked(300)
@given(fields=WATCHED | FIELDS)
@example(fields={"watch_id": "1", "events": [{"type": "DELETE", "kv": {"key": OWN, "mod_revision": "5"}}]})
@example(fields={"watch_id": "1", "events": [{"type": "DELETE", "kv": {"key": OWN, "mod_revision": "5"}}, 5]})
@example(fields={"watch_id": "1", "events": [{"type": [], "kv": {"key": OWN}}]})
def test_a_watch_reports_nothing_but_what_it_understands(fields: dict[str, object]):
    backend, changes = from_url("etcd://one"), []

    async def story() -> None:
        backend._gateway.stream = nothing
        backend._watches.add(EtcdKeys("fencing/").own(CLAIM), 2, changes.append)
        try:
            backend._watches._take(fields)
        except UnreadableAnswerError:
            ended = False
        else:
            ended = fields.get("canceled") is True or any(map(_is_own_end, fields.get("events") or []))
        assert changes in ([], [[]])
        if fields.get("watch_id") == "1":
            assert bool(changes) == ended
        await backend.aclose()

    with asyncio.Runner() as runner:
        runner.run(story())


@contextlib.asynccontextmanager
async def nothing(*_: object):
    async def silent():
        await asyncio.Event().wait()
        yield {}

    yield silent()


def _is_own_end(event: dict[str, dict[str, str]]) -> bool:
    return event.get("type") == "DELETE" and int(event["kv"]["mod_revision"]) > 2
