"""Below the root anybody may write: whatever nodes are there, it is an outcome of the contract or an error."""

import asyncio
import json
import re
from types import SimpleNamespace

import hypothesis.strategies as st
import kazoo.exceptions as driver
import pytest
from contract_checks import CLAIM, JSON, ask_everything
from fuzzing import SEED_SIZE, checked, little_work, long_ones, pieces
from hypothesis import example, given
from inside import TOKEN_LIMIT

from fencing_sdk.abc import Place
from fencing_sdk.backends import from_url
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.zookeeper import CLASSES
from fencing_sdk.backends.zookeeper.driver import NodeEnds
from fencing_sdk.backends.zookeeper.nodes import in_line, mark_of, read_facts, read_record, written

SESSION = 7
OWN = f"lock-{mark_of(CLAIM.owner)}-{SESSION:x}-0000000003"
NAMES = st.one_of(
    st.sampled_from(
        [
            OWN,
            OWN.replace("-7-", "-8-"),
            f"reader-{'a' * 32}-9-0000000001",
            f"permit-2-{'a' * 32}-7-0000000009",
            f"writer-{'b' * 32}-9--2147483648",
        ]
    ),
    pieces(
        "lock-",
        "permit-",
        "a" * 32,
        mark_of(CLAIM.owner),
        "-",
        "--",
        "0000000001",
        "9" * 9,
        "7",
        "\u0663",
        "\n",
        most=6,
    ),
)
DATA = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "ttl": st.floats() | st.integers() | JSON,
            "number": st.integers(-1, 9) | st.just(TOKEN_LIMIT) | JSON,
            "label": st.text(max_size=3) | JSON,
            "token": st.integers(-1, 9) | JSON,
            "last": st.integers(-1, 9) | JSON,
            "permits": st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 3)) | JSON, max_size=3) | JSON,
            "ended": st.lists(st.lists(st.sampled_from(["why", mark_of(CLAIM.owner)]) | JSON), max_size=3) | JSON,
        },
    ).map(lambda fields: json.dumps(fields).encode()),
    st.binary(max_size=20),
)
STATS = st.builds(
    lambda czxid, owner, size: SimpleNamespace(czxid=czxid, ephemeralOwner=owner, dataLength=size, version=0),
    st.integers(1, 9) | st.just(TOKEN_LIMIT - 1),
    st.sampled_from([0, SESSION, -1, 2**63 - 1]),
    st.sampled_from([0, 20]),
)
ERRORS = st.sampled_from([kind for kind, _ in CLASSES] + [driver.NoNodeError, driver.NodeExistsError, driver.APIError])


@checked(200)
@given(names=st.lists(NAMES, max_size=6), transactions=st.lists(st.none() | st.integers(1, 9), min_size=6, max_size=6))
@example(names=[f"lock-{'b' * 32}-9--2147483648", f"lock-{'a' * 32}-9-2147483647", OWN], transactions=[9, 8, None] * 2)
def test_a_line_is_what_looks_like_our_nodes_however_they_are_listed(names: list[str], transactions: list[int | None]):
    created = {name: born for name, born in zip(names, transactions, strict=False) if born is not None}
    line = in_line(names, created)
    assert sorted(node.name for node in line) == sorted(name for name in names if in_line([name], created))
    numbers = [node.number for node in line]
    assert numbers == sorted(place(node.name, created) for node in line)
    if len(set(numbers)) == len(numbers):
        assert in_line(names[::-1], created) == line


def place(name: str, created: dict[str, int]) -> int:
    """The number at the end of *name*; behind all of those, by creation, what has the last number or a negative one."""
    number = int(re.search("-[0-9a-f]{32}-[0-9a-f]+-(.*)", name)[1])
    return 2**31 + created[name] if number < 0 or number == 2**31 - 1 else number


@checked(200)
@given(data=DATA, stat=STATS)
@example(data=b'{"ttl": 1e999}', stat=SimpleNamespace(czxid=5))
@example(data=b'{"number": 1' + b"0" * 400 + b"}", stat=SimpleNamespace(czxid=5))
@example(data=b'{"number": ' + b"1" * 5000 + b"}", stat=SimpleNamespace(czxid=5))
@example(data=b'{"ttl": 1' + b"0" * 400 + b"}", stat=SimpleNamespace(czxid=5))
def test_any_data_is_a_ticket_with_a_number_that_the_node_may_have(data: bytes, stat):
    facts = read_facts(data, stat)
    assert 0 <= facts.number <= stat.czxid
    assert 0 <= facts.ttl < float("inf")
    assert facts.label is None or isinstance(facts.label, str)
    if facts.number < stat.czxid:
        assert read_facts(written(facts.ttl, facts.label, facts.number), stat).number == facts.number


@checked(200)
@given(data=DATA)
def test_any_data_of_a_folder_is_a_record_that_can_be_written_again(data: bytes):
    record = read_record(data)
    assert read_record(record.written()) == record


@pytest.mark.parametrize("name", long_ones("a", "-", "0", "a-"), ids=lambda name: name[:4])
def test_a_long_name_is_little_work(name: str):
    with little_work():
        assert in_line([name, OWN, OWN[:38] + name]) == in_line([OWN])


def test_long_data_is_little_work():
    for data in (b"[" * SEED_SIZE, b'{"number":' * (SEED_SIZE // 10), b'{"number":' + b"1" * SEED_SIZE + b"}"):
        with little_work():
            assert read_facts(data, SimpleNamespace(czxid=5)).number == 5


class Answering:
    """A session whose server gives these answers, in turn for each kind of request; then the connection breaks."""

    id, timeout, lease, connections, connected, error = SESSION, 15.0, 10.0, 1, True, None

    def __init__(self, answers: dict[str, list[object]]) -> None:
        self._answers = answers
        self._asked = 0
        self.ends = NodeEnds()

    def attach(self) -> None: ...

    async def ready(self) -> None: ...

    async def settled(self) -> bool:
        return self._asked < 200

    async def aclose(self, *, close_session: bool) -> None: ...

    def watched(self, call, *arguments):
        return lambda event: call(*arguments, event)

    def create(self, request: object, ttl: float) -> asyncio.Future[object]:
        future = self.call(request)
        if future.exception() is None:
            self.ends.begin(future.result()[0], ttl)
        return future

    def call(self, request: object) -> asyncio.Future[object]:
        self._asked += 1
        given = self._answers.get(type(request).__name__.removeprefix("_"), [None])
        answer = given[self._asked % len(given)] if self._asked < 200 else driver.ConnectionLoss
        future = asyncio.get_running_loop().create_future()
        if isinstance(answer, type):
            future.set_exception(answer())
            future.exception()
        else:
            future.set_result(answer)
        return future


def replies(right: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(right | right | right | ERRORS, min_size=1, max_size=3)


ANSWERS = st.fixed_dictionaries(
    {
        "Create2": replies(st.tuples(st.just(f"/fencing/a/{OWN}") | NAMES, STATS)),
        "CreateContainer": replies(st.tuples(st.text(max_size=3), STATS)),
        "Delete": replies(st.just(True)),
        "Sync": replies(st.text(max_size=3)),
        "Exists": replies(st.none() | STATS),
        "GetChildren2": replies(st.tuples(st.lists(NAMES, max_size=4), STATS)),
        "GetData": replies(st.tuples(DATA, STATS)),
        "Transaction": replies(st.lists(st.text(max_size=3) | st.builds(driver.RolledBackError), max_size=2)),
    }
)


def answered(answers: dict[str, list[object]]):
    backend = from_url("zk://one")
    session = Answering(answers)
    backend._sessions.of = lambda _: session
    backend._sessions.any = lambda: session
    return backend


@checked(200)
@given(answers=ANSWERS)
def test_whatever_zookeeper_answers_is_an_outcome_or_an_error_of_the_contract(answers):
    async def story() -> None:
        backend = answered(answers)
        await ask_everything(backend)
        await backend.aclose()

    with asyncio.Runner() as runner:
        runner.run(story())


def test_these_answers_are_not_refused_one_and_all():
    """What is fuzzed above gets as far as a grant, and an error of the driver as far as one of ours."""
    right = {
        "Create2": [(f"/fencing/a/{OWN}", SimpleNamespace(czxid=5, ephemeralOwner=SESSION))],
        "GetChildren2": [([OWN, "not ours"], SimpleNamespace(dataLength=0, version=0))],
    }

    async def story() -> object:
        backend = answered(right)
        try:
            return await backend.draw(CLAIM)
        finally:
            await backend.give_back(CLAIM)
            await backend.aclose()

    assert asyncio.run(story()) == Place(5, None, 5)
    assert NoConnectionError in dict(CLASSES)
