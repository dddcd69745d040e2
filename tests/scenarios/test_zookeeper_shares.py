"""Permits, readers and writers in ZooKeeper, beside what every store does: nodes, watches, and late answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest
from patience import until
from shares_suite import MODES, NAME, claim_of, granted, served
from stays import PATIENCE, eventually, opened, staying
from zookeeper_stage import Answers, in_place, operating

from fencing_sdk.abc import LOCK, READER, WRITER, Mode, Renewal, Revoked
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url, requests
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError
from fencing_sdk.backends.zookeeper.nodes import without_place

pytest_plugins = ["zookeeper_fixtures"]


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


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("mode", [*MODES, LOCK], ids=lambda mode: mode.word)
async def test_a_waiter_that_leaves_while_it_is_granted_leaves_nothing(
    mode: Mode, released: bool, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """The node of a permit has another name by then than the one that it knows; others change the phase of readers."""
    holder, claim = claim_of(WRITER if mode.shared else READER), claim_of(mode)
    await granted(rival, holder)
    with Answers(backend) as answers:
        async with backend.queue(claim):
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
    for owner, name in ((backend._recipe, "watch"), (backend._recipe, "change_phase"), (requests, "children")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _call=call, _name=name: asked.append(_name) or _call(*args))
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(backend.queue(claim)) for claim in claims]
        assert asked.count("watch") == 1
        asked.clear()
        await backend.release(writer)
        grants = await asyncio.gather(*(served(backend, *each) for each in zip(claims, turns, strict=True)))
    assert len({grant.token for grant in grants}) == 1
    assert asked.count("change_phase") == 1
    assert asked.count("children") < len(claims) / 2  # each answer names all of them
    asked.clear()
    lines = await backend._recipe.look_at_all(backend._sessions.of(writer.ttl), [NAME] * len(claims))  # as renewals do
    assert asked.count("children") < len(claims) / 2  # one, and what the watching of grants looks at meanwhile
    assert [len(line) for line in lines] == [len(claims)] * len(claims)
    assert not backend._wait_queue._readers


async def test_a_reader_whose_node_an_operator_deletes_is_told(backend: ZooKeeperBackend, zookeeper_url: str):
    told: list[str] = []
    backend.on_loss(lambda claim, *_: told.append(claim.owner))
    claims = [claim_of(READER) for _ in range(3)]
    for claim in claims:
        await granted(backend, claim)
    await asyncio.sleep(0.2)
    async with operating(zookeeper_url) as operator:
        (node,) = [node for node in await operator.line(NAME) if claims[1].holder in node]
        await operator.delete(NAME, node)
    await until(lambda: told, what="the holder is told")
    assert told == [claims[1].owner]
    assert list(await backend.renew(claims)) == [Renewal.RENEWED, Renewal.REFUSED, Renewal.RENEWED]


async def test_a_share_that_another_client_goes_on_with_is_not_told_as_revoked(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """Although it is not the first of the line."""
    told: list[str] = []
    backend.on_loss(lambda claim, *_: told.append(claim.owner))
    claims = [claim_of(READER) for _ in range(3)]
    for claim in claims:
        await granted(backend, claim)
    await until(lambda: all(own_node.watched_on for own_node in backend._own_nodes.all()), what="all are watched")
    assert list(await rival.renew([claims[1]])) == [Renewal.RENEWED]
    await until(lambda: len(list(backend._own_nodes.all())) == 2, what="the node is not this client's any more")
    await asyncio.sleep(0.1)
    assert told == []


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
