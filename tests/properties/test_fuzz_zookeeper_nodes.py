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
from inside import TOKEN_LIMIT, holder_of

from fencing_sdk.abc import Grant
from fencing_sdk.backends import from_url
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.zookeeper import CLASSES
from fencing_sdk.backends.zookeeper.driver import NodeEnds
from fencing_sdk.backends.zookeeper.nodes import in_line, mark_of, read_holder, read_token, rewritten

SESSION = 7
OWN = f"{mark_of(CLAIM.owner)}-{SESSION:x}-0000000003"
NAMES = st.one_of(
    st.sampled_from(
        [
            OWN,
            OWN.replace("-7-", "-8-"),
            f"{'a' * 32}-9-0000000001",
            f"{'a' * 32}-7-0000000009",
            f"{'b' * 32}-9--2147483648",
        ]
    ),
    pieces("a" * 32, mark_of(CLAIM.owner), "-", "--", "0000000001", "9" * 9, "7", "\u0663", "\n", most=6),
)
DATA = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "ttl": st.floats() | st.integers() | JSON,
            "token": st.integers(-1, 9) | st.just(TOKEN_LIMIT) | JSON,
            "label": st.text(max_size=3) | JSON,
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
@example(names=[f"{'b' * 32}-9--2147483648", f"{'a' * 32}-9-2147483647", OWN], transactions=[9, 8, None] * 2)
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
    number = int(name[re.search("-[0-9a-f]+-", name[32:]).end() + 32 :])
    return 2**31 + created[name] if number < 0 or number == 2**31 - 1 else number


@checked(200)
@given(data=DATA, stat=STATS, left=st.none() | st.floats(0, 100))
@example(data=b'{"ttl": 1e999}', stat=SimpleNamespace(czxid=5), left=None)
@example(data=b'{"token": 1' + b"0" * 400 + b"}", stat=SimpleNamespace(czxid=5), left=None)
@example(data=b'{"token": ' + b"1" * 5000 + b"}", stat=SimpleNamespace(czxid=5), left=None)
@example(data=b'{"ttl": 1' + b"0" * 400 + b"}", stat=SimpleNamespace(czxid=5), left=None)
def test_any_data_is_a_holder_with_a_token_that_the_node_may_have(data: bytes, stat, left: float | None):
    token = read_token(data, stat)
    assert 0 <= token <= stat.czxid
    (node,) = in_line([OWN])
    holder = read_holder("a", node, data, stat, left)
    assert (holder.token, holder.id) == (token, holder_of(CLAIM.owner))
    assert 0 <= holder.remaining < float("inf")
    assert holder.label is None or isinstance(holder.label, str)
    if token < stat.czxid:
        assert read_token(rewritten(data, CLAIM, token), stat) == token


@pytest.mark.parametrize("name", long_ones("a", "-", "0", "a-"), ids=lambda name: name[:4])
def test_a_long_name_is_little_work(name: str):
    with little_work():
        assert in_line([name, OWN, OWN[:33] + name]) == in_line([OWN])


def test_long_data_is_little_work():
    for data in (b"[" * SEED_SIZE, b'{"token":' * (SEED_SIZE // 9), b'{"token":' + b"1" * SEED_SIZE + b"}"):
        with little_work():
            assert read_token(data, SimpleNamespace(czxid=5)) == 5


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
        "GetChildren2": [([OWN, "not ours"], SimpleNamespace(dataLength=0))],
    }

    async def story() -> object:
        backend = answered(right)
        try:
            return await backend.acquire(CLAIM)
        finally:
            await backend.release(CLAIM)
            await backend.aclose()

    assert asyncio.run(story()) == Grant(5)
    assert NoConnectionError in dict(CLASSES)
