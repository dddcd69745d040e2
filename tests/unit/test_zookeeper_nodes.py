"""How a lock is written down in ZooKeeper: untrusted names, untrusted nodes, and numbers that wrap round."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends.zookeeper.nodes import (
    Paths,
    in_line,
    is_of,
    mark_of,
    read_holder,
    read_token,
    rewritten,
    written,
)
from fencing_sdk.testing.backend_promises.names import ODD_NAMES

PATHS = Paths("/shop/locks")
STAT = SimpleNamespace(czxid=1000, ephemeralOwner=7)


def node(number: int, mark: str = "a" * 32, session: int = 7) -> str:
    return f"{mark}-{session:x}-{number:010d}"


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:20])
def test_every_name_is_one_element_of_a_path(name):
    folder = PATHS.folder(name)
    element = folder.removeprefix("/shop/locks/")
    assert "/" not in element
    assert "." not in element
    assert element.isascii()
    assert element.isprintable()


def test_no_two_names_share_a_folder():
    assert len({PATHS.folder(name) for name in ODD_NAMES}) == len(ODD_NAMES)


def test_a_node_tells_its_holder_and_not_its_owner():
    claim = Claim("a", 10.0)
    (found,) = in_line([PATHS.stem(claim, 7).rsplit("/", 1)[1] + "0000000003"])
    assert found.mark == mark_of(claim.owner)
    assert claim.owner not in found.name
    assert read_holder("a", found, written(claim), STAT, None).holder == claim.holder


@pytest.mark.parametrize("session", [0, 1, 2**63 - 1, -1, -(2**63)])
def test_a_session_is_found_again_in_the_name_of_its_node(session):
    claim = Claim("a", 10.0)
    (found,) = in_line([PATHS.stem(claim, session).rsplit("/", 1)[1] + "0000000003"])
    assert is_of(found, session)
    assert not is_of(found, 12345)
    (moved,) = in_line([PATHS.moved(claim, found, 12345).rsplit("/", 1)[1]])
    assert (moved.number, moved.mark) == (found.number, found.mark)
    assert is_of(moved, 12345)


@example(start=2**31 - 500, steps=[999, 0, 500, 499, 1])
@given(st.integers(-(2**31), 2**31 - 1), st.lists(st.integers(0, 1000), min_size=1, max_size=20, unique=True))
def test_the_line_is_sorted_also_where_the_numbers_wrap_round(start, steps):
    """ZooKeeper counts in signed 32 bits: after 2147483647 comes -2147483648."""
    numbers = [(start + step + 2**31) % 2**32 - 2**31 for step in steps]
    expected = [number for _, number in sorted(zip(steps, numbers, strict=True))]
    assert [found.number for found in in_line(node(number) for number in numbers)] == expected


@pytest.mark.parametrize(
    "name", ["", "not-ours", "lock-0000000001", node(1)[1:], node(1) + "0", "A" * 32 + "-7-0000000001", node(1) + "\n"]
)
def test_what_is_no_node_of_ours_is_left_out(name):
    assert in_line([name, node(2)]) == in_line([node(2)])


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"null", b"[]", b"5", b"[" * 100_000),
        *(b'{"token": "5"}', b'{"token": -1}', b'{"token": 5.0}', b'{"token": true}'),
        *(b'{"token": 1000}', b'{"token": 2000}', b'{"ttl": "x", "metadata": 5}', b'{"ttl": NaN}'),
    ],
)
def test_data_that_nobody_of_us_wrote_is_not_believed(data):
    assert read_token(data, STAT) == 1000
    holder = read_holder("a", in_line([node(1)])[0], data, STAT, None)
    assert (holder.token, holder.metadata, holder.remaining) == (1000, None, 0.0)


def test_a_node_that_moved_keeps_its_token_and_its_metadata():
    claim = Claim("a", 10.0, metadata="batch 7")
    data = rewritten(written(claim), Claim("a", 10.0, claim.owner), 512)
    assert read_token(data, STAT) == 512
    assert read_token(rewritten(data, claim, 512), SimpleNamespace(czxid=2000)) == 512
    assert read_holder("a", in_line([node(1)])[0], data, STAT, None).metadata == "batch 7"


def test_the_parents_are_made_from_the_top():
    assert PATHS.parents() == ["/shop", "/shop/locks"]
