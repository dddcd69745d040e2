"""Permits, readers and writers in ZooKeeper, beside what every store does: nodes, watches, and late answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import until
from stays import PATIENCE, eventually, opened, staying
from zookeeper_stage import Answers, granted, in_place, kept, operating, tickets_of

from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Gone, Mode, News, Permit
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url, requests
from fencing_sdk.backends.zookeeper.nodes import (
    NOTHING,
    Paths,
    in_line,
    is_of,
    mark_of,
    node_at,
    read_facts,
    read_record,
    without_place,
    written,
)

pytest_plugins = ["zookeeper_fixtures"]

NAME = "invoices/42"


def claim_of(mode: Mode) -> Claim:
    return Claim(NAME, 60.0, mode=mode)


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
    return [node.name for node in (await backend._recipe.look(session, name)).line]


@pytest.mark.parametrize("mode", [Permit(3), READER, WRITER, LOCK], ids=lambda mode: mode.word)
async def test_a_draw_that_is_given_up_while_its_turn_is_written_leaves_nothing(
    mode: Mode, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    holder, claim = claim_of(WRITER if mode.shared else READER), claim_of(mode)
    await granted(rival, holder)
    assert (await backend.draw(claim)).token is None
    with Answers(backend) as answers:
        answers.slow.clear()
        await rival.give_back(holder)
        if mode.shared:
            await until(lambda: answers.carried_out, what="the turn is written")
        trying = asyncio.create_task(backend.draw(claim))
        await asyncio.sleep(0.01)
        trying.cancel()
        await asyncio.wait((trying,))
        await backend.give_back(claim)
        answers.slow.set()

    async def gone() -> bool:
        return not await line_of(rival)

    await eventually(gone, what="no node is left")
    await granted(rival, claim_of(WRITER))


async def test_a_turn_whose_answer_is_lost_is_found(backend: ZooKeeperBackend):
    """The permit is written, and the one that the owner gets."""
    claims = [claim_of(Permit(3)) for _ in range(2)]
    first = await granted(backend, claims[0])
    with Answers(backend) as answers:
        answers.lost = 1
        second = await granted(backend, claims[1])
    assert (first.permit, second.permit) == (0, 1)
    assert await kept(backend, *claims) == [first, second]


async def test_a_permit_that_begins_to_hold_lets_the_next_one_look(backend: ZooKeeperBackend, rival: ZooKeeperBackend):
    """Three wait in a row, and two numbers become free: each client hears of its own turn, before it asks."""
    holders, waiting = [claim_of(Permit(2)) for _ in range(2)], [claim_of(Permit(2)) for _ in range(3)]
    for claim in holders:
        await granted(backend, claim)
    heard: list[tuple[int, News]] = []
    for number, claim in enumerate(waiting):
        client = (backend, rival)[number % 2]
        client.listen(claim, lambda news, number=number: heard.append((number, news)))
        assert (await client.draw(claim)).token is None
    for claim in holders:
        await backend.give_back(claim)
    await until(lambda: len([news for _, news in heard if news is not None]) == 2, what="two bells")
    assert [number for number, news in heard if news is not None] == [0, 1]
    assert [news.permit for _, news in heard if news is not None] == [0, 1]


async def test_the_reasons_of_operators_stand_beside_the_turns(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend, zookeeper_url: str
):
    """The owner's next ticket ends the reason for the one before."""
    async with operating(zookeeper_url) as operator:
        await operator.keep_folder(NAME)
    readers, later, writer = [claim_of(READER) for _ in range(3)], claim_of(READER), claim_of(WRITER)
    for claim in readers:
        token = (await granted(backend, claim)).token
    assert await rival.end(NAME, token - 1, "wrong") is False
    assert await rival.end(NAME, token, "maintenance") is True
    assert await kept(backend, *readers) == [Gone("maintenance")] * 3
    after = (await granted(backend, later)).token
    assert after > token
    assert await kept(backend, *readers) == [Gone("maintenance")] * 3
    await backend.give_back(later)
    last = (await granted(backend, writer)).token
    assert last > after
    assert await rival.end(NAME, last, "again") is True
    assert await kept(backend, writer, readers[0]) == [Gone("again"), Gone("maintenance")]
    again = await granted(backend, writer)
    await backend.give_back(writer)
    assert again.token > last
    assert await kept(backend, writer) == [Gone()]


async def test_readers_of_one_client_share_a_watch_and_a_look(
    backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    writer, claims, heard, asked = claim_of(WRITER), [claim_of(READER) for _ in range(30)], [], []
    await granted(backend, writer)
    for claim in claims:
        backend.listen(claim, heard.append)
        assert (await backend.draw(claim)).token is None
    watched = [len(waiting) for waiting in backend._tickets._lines[NAME].watched.values()]
    assert sum(watched) == 30
    assert len(watched) <= 2, "one for each session: the first did not know that it would wait"
    for owner, name in ((backend._recipe, "write"), (requests, "GetChildren2")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _call=call, _name=name: asked.append(_name) or _call(*args))
    await backend.give_back(writer)
    await until(lambda: len(heard) == 30, what="all hear of it")
    assert len({place.token for place in heard}) == 1
    assert asked.count("write") == 1
    assert asked.count("GetChildren2") <= 2


async def test_a_reader_whose_node_an_operator_deletes_hears_of_it(backend: ZooKeeperBackend, zookeeper_url: str):
    heard: list[str] = []
    claims = [claim_of(READER) for _ in range(3)]
    for claim in claims:
        backend.listen(claim, lambda _, claim=claim: heard.append(claim.owner))
        await granted(backend, claim)
    await until(lambda: all(own.watched_on for own in tickets_of(backend)), what="all are watched")
    async with operating(zookeeper_url) as operator:
        (node,) = [node for node in await operator.line(NAME) if claims[1].holder in node]
        await operator.delete(NAME, node)
    await until(lambda: heard, what="the holder hears of it")
    assert heard == [claims[1].owner]
    assert [isinstance(answer, Gone) for answer in await kept(backend, *claims)] == [False, True, False]


async def test_a_try_on_a_name_that_is_held_writes_nothing_the_second_time(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    holder = claim_of(LOCK)
    await granted(rival, holder)
    assert isinstance(await backend.draw(claim_of(LOCK), only_if_it_holds=True), Busy)
    made, create = [], requests.Create2
    monkeypatch.setattr(requests, "Create2", lambda *args: made.append(args) or create(*args))
    for mode in (LOCK, READER, Permit(3)):
        assert isinstance(await backend.draw(claim_of(mode), only_if_it_holds=True), Busy)
    assert not made
    await rival.give_back(holder)
    assert (await backend.draw(claim_of(LOCK), only_if_it_holds=True)).token is not None


async def test_a_ticket_waits_on_a_session_that_is_short(backend: ZooKeeperBackend, rival: ZooKeeperBackend):
    """A process that dies while it waits leaves its node for no longer; what holds is on the session of its ttl."""
    holder, waiting = claim_of(LOCK), claim_of(LOCK)
    await granted(rival, holder)
    place = await backend.draw(waiting)
    (own,) = tickets_of(backend)
    assert own.session.lease == pytest.approx(60.0, rel=0.6)

    async def moved() -> bool:
        assert (await kept(backend, waiting))[0].number == place.number
        return own.session is backend._sessions.of(5.0)

    await eventually(moved, what="it is moved")
    await rival.give_back(holder)
    after = await granted(backend, waiting)
    assert after.token == place.number
    await kept(backend, waiting)
    assert own.session is backend._sessions.of(60.0)
    assert await kept(backend, waiting) == [after]


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
            assert len(without_place(await line_of(one._backend, "a"))) > 8
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
    assert len(set(tokens)) == 12
    for sequence in (order, [number for _, number in sorted(zip(tokens, order, strict=True))]):
        # The first of the line may take what is free in any order, as many as there are permits.
        assert all(number - place < most for place, number in enumerate(sequence)), sequence


# How a line is written down in ZooKeeper: untrusted names, untrusted nodes, and numbers that come to an end.


PATHS = Paths("/shop/locks")
STAT = SimpleNamespace(czxid=1000, ephemeralOwner=7)


def node(number: int, mark: str = "a" * 32, session: int = 7, mode: str = "lock") -> str:
    return f"{mode}-{mark}-{session:x}-{number:010d}"


@pytest.mark.parametrize("mode", [LOCK, WRITER, READER, Permit(1), Permit(2**31)], ids=str)
def test_a_node_shows_its_holder_and_its_mode_and_not_its_owner(mode: Mode):
    claim = Claim("a", 10.0, mode=mode)
    found = node_at(PATHS.stem("a", mode, mark_of(claim.owner), 7) + "0000000003", 5)
    assert (found.mode, found.holder, found.number) == (mode, claim.holder, 3)
    assert claim.owner not in found.name


@pytest.mark.parametrize("session", [0, 1, 2**63 - 1, -1, -(2**63)])
def test_a_session_is_found_again_in_the_name_of_its_node(session):
    found = node_at(PATHS.stem("a", LOCK, "a" * 32, session) + "0000000003", 5)
    assert is_of(found, session)
    assert not is_of(found, 12345)
    moved = node_at(PATHS.moved("a", found, "b" * 32, 12345), 6)
    assert (moved.number, moved.mark) == (found.number, "b" * 32)
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
    first, second = in_line(names, {names[0]: 77, names[1]: 80})
    name = PATHS.moved("a", first, first.mark, 12345).rsplit("/", 1)[1]
    assert without_place([name]) == []
    (again, _) = in_line([names[1], name], {names[1]: 80})
    assert (again.name, again.number) == (name, first.number)
    assert first.number < second.number


def test_a_field_of_another_version_is_passed_over():
    data = b'{"ttl": 10.0, "label": "worker 3", "of_another_version": [1]}'
    assert read_facts(data, STAT).label == "worker 3"


def test_a_node_that_moved_keeps_its_number_and_its_label():
    facts = read_facts(written(10.0, "batch 7", 512), STAT)
    assert (facts.number, facts.label, facts.ttl) == (512, "batch 7", 10.0)
    assert read_facts(written(10.0, None, 1001), STAT).number == 1000, "a number that it cannot have"


def test_what_a_folder_says_is_read_as_it_was_written():
    line = in_line([node(number, mark=f"{number:032x}", mode="permit-3") for number in range(3)])
    record = NOTHING.with_turns(line, 3, 5).with_end("why", [line[0].mark]).with_end("\u00e9", [line[1].mark])
    assert read_record(record.written()) == record
    assert record.permits == {0: 0, 1: 1, 2: 2}
    assert record.with_turns(line[1:], 1, 5).permits == {1: 1, 2: 2}
    assert record.with_turns(line, 1, 5) == record, "what a later one has is kept"
    assert record.reason_for(line[0].mark) == "why"
    assert record.without_reason(line[0].mark).without_reason(line[1].mark).ended == ()
    readers = in_line([node(number, mark=f"{number:032x}", mode="reader") for number in range(3)])
    record = NOTHING.with_turns(readers, 2, 7)
    assert read_record(record.written()) == record
    assert [record.turn_of(reader, 9) for reader in readers] == [(7, None), (7, None), (None, None)]
    assert record.with_turns(readers[1:], 2, 9).turn_of(readers[2], 9) == (7, None)
    assert record.with_turns(readers[2:], 1, 9).turn_of(readers[2], 9) == (9, None)
