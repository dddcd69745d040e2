"""How a lock is written down in ZooKeeper: untrusted names, untrusted nodes, and numbers that come to an end."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencing_sdk._values.claim import Claim, Permit
from fencing_sdk.backends.zookeeper.nodes import (
    Paths,
    in_line,
    is_of,
    mark_of,
    read_holder,
    read_token,
    rewritten,
    without_place,
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


LAST = 2**31 - 1


@given(st.permutations(range(40)))
def test_the_line_is_in_the_order_of_creation_also_after_the_last_number(order):
    """ZooKeeper counts to 2147483647, and then repeats that number and gives negative ones between."""
    numbers = [LAST - 20 + place if place < 20 else (LAST, -LAST - 1, -LAST, LAST)[place % 4] for place in range(40)]
    names = [node(number, mark=f"{place:032x}") for place, number in enumerate(numbers)]
    created = {name: 5000 + place for place, name in enumerate(names)}
    line = in_line([names[place] for place in order], {name: created[name] for name in without_place(names)})
    assert [found.name for found in line] == names


def test_a_node_without_a_place_that_has_gone_is_left_out():
    names = [node(LAST, mark="1" * 32), node(LAST - 1), node(-LAST, mark="2" * 32)]
    assert without_place(names) == [names[0], names[2]]
    assert [found.name for found in in_line(names, {names[0]: 77})] == [names[1], names[0]]


def test_a_node_that_moves_after_the_last_number_keeps_its_place():
    names = [node(LAST, mark="1" * 32), node(LAST, mark="2" * 32)]
    claim = Claim("a", 10.0, mode=Permit(4))
    first, second = in_line(names, {names[0]: 77, names[1]: 80})
    moved = [PATHS.moved(claim, first, 12345), PATHS.granted(claim, first, 2)]
    for name in (path.rsplit("/", 1)[1] for path in moved):
        assert without_place([name]) == []
        (again, _) = in_line([names[1], name], {names[1]: 80})
        assert (again.name, again.number) == (name, first.number)
    assert first.number < second.number


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


def test_a_field_of_another_version_is_passed_over():
    data = b'{"ttl": 10.0, "metadata": "worker 3", "of_another_version": [1]}'
    assert read_holder("a", in_line([node(1)])[0], data, STAT, None).metadata == "worker 3"


def test_a_node_that_moved_keeps_its_token_and_its_metadata():
    claim = Claim("a", 10.0, metadata="batch 7")
    data = rewritten(written(claim), Claim("a", 10.0, claim.owner), 512)
    assert read_token(data, STAT) == 512
    assert read_token(rewritten(data, claim, 512), SimpleNamespace(czxid=2000)) == 512
    assert read_holder("a", in_line([node(1)])[0], data, STAT, None).metadata == "batch 7"


def test_the_parents_are_made_from_the_top():
    assert PATHS.parents() == ["/shop", "/shop/locks"]
