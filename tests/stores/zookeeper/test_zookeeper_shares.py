"""Permits, readers and writers in ZooKeeper, beside what every store does: nodes, watches, and late answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.exceptions import NoNodeError
from patience import until
from shares_suite import MODES, NAME, claim_of, granted, served
from stays import PATIENCE, eventually, opened, staying
from zookeeper_stage import Answers, in_place, operating

from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Mode, Permit, Renewal, Revoked
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url, requests, waiters
from fencing_sdk.backends.zookeeper.nodes import (
    Paths,
    is_of,
    mark_of,
    read_holder,
    read_token,
    rewritten,
    without_place,
    written,
)
from fencing_sdk.backends.zookeeper.nodes import (
    in_line as in_order,
)
from fencing_sdk.testing.promises.under_test import in_line

pytest_plugins = ["zookeeper_fixtures"]


# Permits, readers and writers in ZooKeeper, beside what every store does: nodes, watches, and late answers.


@pytest.fixture
async def backend(zookeeper_url: str) -> AsyncIterator[ZooKeeperBackend]:
    async with aclosing(from_url(zookeeper_url)) as made:
        yield made


@pytest.fixture
async def rival(zookeeper_url: str) -> AsyncIterator[ZooKeeperBackend]:
    async with aclosing(from_url(zookeeper_url)) as made:
        yield made


async def line_of(backend: ZooKeeperBackend, name: str = NAME) -> list[str]:
    """The nodes of all who hold or wait."""
    session = backend._sessions.any()
    assert await session.settled()
    return [node.name for node in await backend._recipe.look(session, name)]


async def test_a_permit_behind_readers_is_refused_without_waiting_for_their_numbers(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    """Readers have none to take."""
    monkeypatch.setattr(waiters, "_NUMBERS_WITHIN", 10 * PATIENCE)
    await granted(rival, claim_of(READER))
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await backend.acquire(claim_of(Permit(2))), Busy)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("mode", [*MODES, LOCK], ids=lambda mode: mode.word)
async def test_a_waiter_that_leaves_while_it_is_granted_leaves_nothing(
    mode: Mode, released: bool, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """The node of a permit has another name by then than the one that it knows; others change the phase of readers."""
    holder, claim = claim_of(WRITER if mode.shared else READER), claim_of(mode)
    await granted(rival, holder)
    with Answers(backend) as answers:
        async with in_line(backend, claim):
            await rival.release(holder)
            answers.slow.clear()
            trying = asyncio.create_task(backend.acquire(claim))
            await until(lambda: answers.carried_out, what="the grant is carried out")
            trying.cancel()
            await asyncio.wait((trying,))
        if released:
            await backend.release(claim)

    async def gone() -> bool:
        return not await line_of(rival)

    await eventually(gone, what="no node is left")
    await granted(rival, claim_of(WRITER))


async def test_no_phase_begins_for_a_reader_that_has_gone_or_that_looked_before_a_writer(backend: ZooKeeperBackend):
    reader, writer, recipe = claim_of(READER), claim_of(WRITER), backend._recipe
    token = (await granted(backend, reader)).token
    session, (node,) = backend._sessions.of(reader.ttl), await line_of(backend)
    path = f"{recipe.paths.folder(NAME)}/{node}"
    before = await recipe.phase(session, NAME)
    assert before.token == token
    outdated = before._replace(version=before.version - 1)
    assert await recipe.change_phase(session, NAME, outdated, token, path) is False
    await backend.release(reader)
    await granted(backend, writer)
    after = await recipe.phase(session, NAME)
    with pytest.raises(NoNodeError):
        await recipe.change_phase(session, NAME, after, token, path)
    assert await recipe.phase(session, NAME) == after
    assert (after.token, after.version) == (None, before.version + 1)


async def test_an_operator_ends_the_readers_of_a_phase_or_a_writer(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend, zookeeper_url: str
):
    """Notes for their holders and the phase of later readers stand side by side."""
    async with operating(zookeeper_url) as operator:
        await operator.keep_folder(NAME)
    readers, later, writer = [claim_of(READER) for _ in range(3)], claim_of(READER), claim_of(WRITER)
    for claim in readers:
        token = (await granted(backend, claim)).token
    assert await rival.revoke(NAME, token - 1, "wrong") is False
    assert await rival.revoke(NAME, token, "maintenance") is True
    assert list(await backend.renew(readers)) == [Revoked("maintenance")] * 3
    after = (await granted(backend, later)).token
    assert after > token
    assert list(await backend.renew(readers)) == [Revoked("maintenance")] * 3
    await backend.release(later)
    last = (await granted(backend, writer)).token
    assert last > after
    assert await rival.revoke(NAME, last, "again") is True
    assert list(await backend.renew([writer, readers[0]])) == [Revoked("again"), Revoked("maintenance")]


async def test_readers_of_one_client_share_a_watch_and_their_looks(
    backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    writer, claims, asked = claim_of(WRITER), [claim_of(READER) for _ in range(30)], []
    await granted(backend, writer)
    for owner, name in ((backend._recipe, "watch"), (backend._recipe, "change_phase"), (requests, "GetChildren2")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _call=call, _name=name: asked.append(_name) or _call(*args))
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(in_line(backend, claim)) for claim in claims]
        assert asked.count("watch") == 1
        asked.clear()
        await backend.release(writer)
        grants = await asyncio.gather(*(served(backend, *each) for each in zip(claims, turns, strict=True)))
    assert len({grant.token for grant in grants}) == 1
    assert asked.count("change_phase") == 1
    assert asked.count("GetChildren2") < len(claims) / 2  # each answer names all of them
    asked.clear()
    lines = await backend._recipe.look_at_all(backend._sessions.of(writer.ttl), [NAME] * len(claims))  # as renewals do
    assert asked.count("GetChildren2") < len(claims) / 2  # one, and what the watching of grants looks at meanwhile
    assert [len(line) for line in lines] == [len(claims)] * len(claims)
    assert not backend._wait_queue._readers


async def test_a_reader_whose_node_an_operator_deletes_is_told(backend: ZooKeeperBackend, zookeeper_url: str):
    heard: list[str] = []
    backend.on_loss(lambda claim, *_: heard.append(claim.owner))
    claims = [claim_of(READER) for _ in range(3)]
    for claim in claims:
        await granted(backend, claim)
    await asyncio.sleep(0.2)
    async with operating(zookeeper_url) as operator:
        (node,) = [node for node in await operator.line(NAME) if claims[1].holder in node]
        await operator.delete(NAME, node)
    await until(lambda: heard, what="the holder is told")
    assert heard == [claims[1].owner]
    assert list(await backend.renew(claims)) == [Renewal.RENEWED, Renewal.REFUSED, Renewal.RENEWED]


async def test_a_share_that_another_client_goes_on_with_is_not_told_as_revoked(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """Although it is not the first of the line."""
    heard: list[str] = []
    backend.on_loss(lambda claim, *_: heard.append(claim.owner))
    claims = [claim_of(READER) for _ in range(3)]
    for claim in claims:
        await granted(backend, claim)
    await until(lambda: all(own_node.watched_on for own_node in backend._own_nodes.all()), what="all are watched")
    assert list(await rival.renew([claims[1]])) == [Renewal.RENEWED]
    await until(lambda: len(list(backend._own_nodes.all())) == 2, what="the node is not this client's any more")
    await asyncio.sleep(0.1)
    assert heard == []


KINDS = {
    "lock": (lambda locks: locks.lock("a", ttl=60), 1),
    "permit": (lambda locks: locks.semaphore("a", permits=2, ttl=60), 2),
    "writer": (lambda locks: locks.rwlock("a", ttl=60).writer, 1),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_nodes_that_are_made_after_the_last_number_hold_and_wait_in_order(kind, start_zookeeper):
    lock_of, most = KINDS[kind]
    server = start_zookeeper()
    async with opened(server.url) as (locks, _), lock_of(locks):
        pass
    await asyncio.to_thread(server.set_counter, "/fencing/a", 2**31 - 4)
    async with opened(server.url) as (one, _), opened(server.url) as (two, _):
        inside: list[int] = []
        order: list[int] = []
        tokens: list[int] = []

        async def use(number: int) -> None:
            async with lock_of((one, two)[number % 2]) as lease:
                assert len(inside) < most
                inside.append(number)
                order.append(number)
                tokens.append(lease.token)
                await asyncio.sleep(0.01)
                inside.remove(number)

        async with AsyncExitStack() as held:
            for _ in range(most):
                await held.enter_async_context(staying(lock_of(one)))
            tasks = []
            for number in range(12):
                tasks.append(asyncio.create_task(use(number)))
                await in_place(one, (number + 2) // 2)
                await in_place(two, (number + 1) // 2)
            assert len(without_place(await line_of(one._backend, "a"))) > 10
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
    assert len(set(tokens)) == 12
    for sequence in (order, [number for _, number in sorted(zip(tokens, order, strict=True))]):
        # The first of the line may take what is free in any order, as many as there are permits.
        assert all(number - place < most for place, number in enumerate(sequence)), sequence


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_node_that_is_given_up_while_it_is_adopted_is_found_by_the_same_try(
    mode: Mode, backend: ZooKeeperBackend, rival: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    """The loss watcher hears that another client has replaced the node, and finds the other one."""
    claim = claim_of(mode)
    grant = await granted(backend, claim)
    await granted(rival, claim)
    adopt = backend._recipe.adopt

    async def adopted(*arguments: object) -> object:
        monkeypatch.undo()
        found = await adopt(*arguments)
        if (own_node := backend._own_nodes.get((claim.name, claim.owner))) is not None:
            backend._own_nodes.drop(own_node)  # or the loss watcher has heard of it by now
        return found

    monkeypatch.setattr(backend._recipe, "adopt", adopted)
    again = await granted(backend, claim)
    assert (again.token, again.permit) == (grant.token, grant.permit)
    await backend.release(claim)
    assert await line_of(rival) == []


# How a lock is written down in ZooKeeper: untrusted names, untrusted nodes, and numbers that come to an end.


PATHS = Paths("/shop/locks")
STAT = SimpleNamespace(czxid=1000, ephemeralOwner=7)


def node(number: int, mark: str = "a" * 32, session: int = 7) -> str:
    return f"{mark}-{session:x}-{number:010d}"


def test_a_node_tells_its_holder_and_not_its_owner():
    claim = Claim("a", 10.0)
    (found,) = in_order([PATHS.stem(claim, 7).rsplit("/", 1)[1] + "0000000003"])
    assert found.mark == mark_of(claim.owner)
    assert claim.owner not in found.name
    assert read_holder("a", found, written(claim), STAT, None).id == claim.holder


@pytest.mark.parametrize("session", [0, 1, 2**63 - 1, -1, -(2**63)])
def test_a_session_is_found_again_in_the_name_of_its_node(session):
    claim = Claim("a", 10.0)
    (found,) = in_order([PATHS.stem(claim, session).rsplit("/", 1)[1] + "0000000003"])
    assert is_of(found, session)
    assert not is_of(found, 12345)
    (moved,) = in_order([PATHS.moved(claim, found, 12345).rsplit("/", 1)[1]])
    assert (moved.number, moved.mark) == (found.number, found.mark)
    assert is_of(moved, 12345)


LAST = 2**31 - 1


@given(st.permutations(range(40)))
def test_the_line_is_in_the_order_of_creation_also_after_the_last_number(order):
    """ZooKeeper counts to 2147483647, and then repeats that number and gives negative ones between."""
    numbers = [LAST - 20 + place if place < 20 else (LAST, -LAST - 1, -LAST, LAST)[place % 4] for place in range(40)]
    names = [node(number, mark=f"{place:032x}") for place, number in enumerate(numbers)]
    created = {name: 5000 + place for place, name in enumerate(names)}
    line = in_order([names[place] for place in order], {name: created[name] for name in without_place(names)})
    assert [found.name for found in line] == names


def test_a_node_without_a_place_that_has_gone_is_left_out():
    names = [node(LAST, mark="1" * 32), node(LAST - 1), node(-LAST, mark="2" * 32)]
    assert without_place(names) == [names[0], names[2]]
    assert [found.name for found in in_order(names, {names[0]: 77})] == [names[1], names[0]]


def test_a_node_that_moves_after_the_last_number_keeps_its_place():
    names = [node(LAST, mark="1" * 32), node(LAST, mark="2" * 32)]
    claim = Claim("a", 10.0, mode=Permit(4))
    first, second = in_order(names, {names[0]: 77, names[1]: 80})
    moved = [PATHS.moved(claim, first, 12345), PATHS.granted(claim, first, 2)]
    for name in (path.rsplit("/", 1)[1] for path in moved):
        assert without_place([name]) == []
        (again, _) = in_order([names[1], name], {names[1]: 80})
        assert (again.name, again.number) == (name, first.number)
    assert first.number < second.number


def test_a_field_of_another_version_is_passed_over():
    data = b'{"ttl": 10.0, "label": "worker 3", "of_another_version": [1]}'
    assert read_holder("a", in_order([node(1)])[0], data, STAT, None).label == "worker 3"


def test_a_node_that_moved_keeps_its_token_and_its_label():
    claim = Claim("a", 10.0, label="batch 7")
    data = rewritten(written(claim), Claim("a", 10.0, claim.owner), 512)
    assert read_token(data, STAT) == 512
    assert read_token(rewritten(data, claim, 512), SimpleNamespace(czxid=2000)) == 512
    assert read_holder("a", in_order([node(1)])[0], data, STAT, None).label == "batch 7"
