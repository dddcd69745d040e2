"""Permits, readers and writers in ZooKeeper: late and lost answers, tokens, and whom a release wakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
from patience import until
from stays import eventually
from zookeeper_stage import operating

from fencing_sdk.abc import READER, WRITER, Claim, Grant, Held, Mode, Permit, Renewal, Revoked, Turn
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["zookeeper_fixtures"]

MODES = [Permit(of=2), READER, WRITER]
NAME = "shared"


@pytest.fixture
async def backend(zookeeper_url: str) -> AsyncIterator[ZooKeeperBackend]:
    async with aclosing(from_url(zookeeper_url)) as made:
        yield made


@pytest.fixture
async def rival(zookeeper_url: str) -> AsyncIterator[ZooKeeperBackend]:
    async with aclosing(from_url(zookeeper_url)) as made:
        yield made


def claim_of(mode: Mode, *, ttl: float = 30.0) -> Claim:
    return Claim(NAME, ttl, mode=mode)


async def granted(backend: ZooKeeperBackend, claim: Claim) -> Grant:
    outcome = await backend.acquire(claim)
    assert isinstance(outcome, Grant), outcome
    return outcome


async def served(backend: ZooKeeperBackend, claim: Claim, turn: Turn) -> Grant:
    """Wait for the turn by wake-ups alone."""
    async with asyncio.timeout(20):
        while not isinstance(outcome := await backend.acquire(claim), Grant):
            await turn.wait()
    return outcome


async def line_of(backend: ZooKeeperBackend) -> list[str]:
    """The nodes of all who hold or wait."""
    session = backend._sessions.any()
    await session.ready()
    return [node.name for node in await backend._recipe.look(session, NAME)]


class Answers:
    """The grants of a backend: carried out, and then not answered (`lost`), or answered when told (`slow`)."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self.lost = 0
        self.slow = asyncio.Event()
        self.slow.set()
        self.carried_out = 0
        recipe = backend._recipe
        self._calls = {name: getattr(recipe, name) for name in ("write_grant", "begin_phase")}
        for name in self._calls:
            setattr(recipe, name, lambda *args, called=name, **kwargs: self._pass(called, *args, **kwargs))

    async def _pass(self, called: str, *args: Any, **kwargs: Any) -> Any:
        answer = await asyncio.shield(asyncio.ensure_future(self._calls[called](*args, **kwargs)))
        self.carried_out += 1
        await self.slow.wait()
        if self.lost:
            self.lost -= 1
            raise BackendUnavailableError("ZooKeeperBackend", "acquire", "the answer is lost")
        return answer


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_waiter_whose_grant_was_not_answered_has_it(
    mode: Mode, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    holder, claim, answers = claim_of(WRITER), claim_of(mode), Answers(backend)
    await granted(rival, holder)
    async with backend.queue(claim) as turn:
        assert isinstance(await backend.acquire(claim), Held)
        await rival.release(holder)
        async with asyncio.timeout(20):
            await turn.wait()
        answers.lost = 1
        with pytest.raises(BackendUnavailableError):
            await backend.acquire(claim)
        grant = await granted(backend, claim)
        again = await granted(backend, claim)
    assert (again.token, again.permit) == (grant.token, grant.permit)
    (shown,) = await rival.holders(NAME)
    assert (shown.token, shown.permit, shown.holder) == (grant.token, grant.permit, claim.holder)
    assert list(await backend.renew([claim])) == [Renewal.RENEWED]
    await backend.release(claim)
    assert await line_of(rival) == []


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_waiter_that_leaves_while_it_is_granted_leaves_nothing(
    mode: Mode, released: bool, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """Its node has another name by then than the one that it knows."""
    holder, claim, answers = claim_of(WRITER), claim_of(mode), Answers(backend)
    await granted(rival, holder)
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
    session, (node,) = backend._sessions.of(30.0), await line_of(backend)
    path = f"{recipe.paths.folder(NAME)}/{node}"
    before = await recipe.phase(session, NAME)
    assert before.token == token
    outdated = before._replace(version=before.version - 1)
    assert await recipe.begin_phase(session, NAME, outdated, path) is None
    await backend.release(reader)
    await granted(backend, writer)
    after = await recipe.phase(session, NAME)
    with pytest.raises(NoNodeError):
        await recipe.begin_phase(session, NAME, after, path)
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


async def test_the_list_shows_shares_and_who_waits_for_them(backend: ZooKeeperBackend, rival: ZooKeeperBackend):
    reader, writer = claim_of(READER), claim_of(WRITER)
    token = (await granted(backend, reader)).token
    async with backend.queue(writer), backend.queue(claim_of(Permit(of=3))):
        (held,) = (await rival.list_held("", None, 10)).holders
        assert (held.token, held.mode, held.waiters) == (token, READER, 2)
        assert [waiting.mode for waiting in await rival.list_waiters(NAME)] == [WRITER, Permit(of=3)]


async def test_a_writer_is_above_readers_that_drew_their_token_after_it_joined(backend: ZooKeeperBackend):
    """Its place in the line is older than the token of the readers before it."""
    first, reader, writer = claim_of(WRITER), claim_of(READER), claim_of(WRITER)
    await granted(backend, first)
    async with backend.queue(reader) as reading, backend.queue(writer) as writing:
        await backend.release(first)
        read = await served(backend, reader, reading)
        await backend.release(reader)
        assert (await served(backend, writer, writing)).token > read.token


async def test_readers_of_two_phases_have_two_tokens(backend: ZooKeeperBackend, rival: ZooKeeperBackend):
    tokens = []
    for mode in (READER, WRITER, READER):
        claims = [claim_of(mode) for _ in range(2 if mode == READER else 1)]
        tokens.append({(await granted(backend, claim)).token for claim in claims})
        for claim in claims:
            await backend.release(claim)
    (one,), (two,), (three,) = tokens
    assert one < two < three


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_share_keeps_its_token_and_its_number_when_another_client_goes_on_with_it(
    mode: Mode, backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    before, claim = claim_of(WRITER), claim_of(mode)
    await granted(backend, before)
    async with backend.queue(claim) as turn:
        await backend.release(before)
        grant = await served(backend, claim, turn)
    assert list(await rival.renew([claim])) == [Renewal.RENEWED]
    again = await granted(rival, claim)
    assert (again.token, again.permit) == (grant.token, grant.permit)
    await rival.release(claim)
    assert await line_of(rival) == []


async def test_a_waiter_is_not_renewed(backend: ZooKeeperBackend, rival: ZooKeeperBackend):
    await granted(backend, claim_of(WRITER))
    for mode in MODES:
        claim = claim_of(mode)
        async with backend.queue(claim):
            assert list(await rival.renew([claim])) == [Renewal.REFUSED]


async def test_a_permit_that_is_given_back_wakes_the_first_waiter_alone(backend: ZooKeeperBackend):
    held, claims = [claim_of(Permit(of=2)) for _ in range(2)], [claim_of(Permit(of=2)) for _ in range(4)]
    for claim in held:
        await granted(backend, claim)
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(backend.queue(claim)) for claim in claims]
        await asyncio.sleep(0.1)
        for claim, turn in zip(claims, turns, strict=True):
            assert isinstance(await backend.acquire(claim), Held)
            turn._own_node.woken.clear()  # type: ignore[attr-defined]  # the first of them saw the others come
        await backend.release(held[1])
        assert (await served(backend, claims[0], turns[0])).permit == 1
        for turn in turns[2:]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await turn.wait()
        await backend.release(held[0])
        assert (await served(backend, claims[1], turns[1])).permit == 0


async def test_tries_at_the_same_moment_get_all_permits_that_are_free(
    backend: ZooKeeperBackend, rival: ZooKeeperBackend
):
    """None is refused because the one ahead has not got its number yet."""
    for _ in range(10):
        claims = [claim_of(Permit(of=4)) for _ in range(4)]
        outcomes = await asyncio.gather(
            *((backend, rival)[number % 2].acquire(claim) for number, claim in enumerate(claims))
        )
        assert {outcome.permit for outcome in outcomes if isinstance(outcome, Grant)} == {0, 1, 2, 3}
        for number, claim in enumerate(claims):
            await (backend, rival)[number % 2].release(claim)


async def test_readers_of_one_client_share_a_watch_and_their_looks(
    backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
):
    writer, claims, asked = claim_of(WRITER), [claim_of(READER) for _ in range(30)], []
    await granted(backend, writer)
    for name in ("watch", "look_at_all", "begin_phase"):
        call = getattr(backend._recipe, name)
        monkeypatch.setattr(
            backend._recipe, name, lambda *args, _call=call, _name=name: asked.append(_name) or _call(*args)
        )
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(backend.queue(claim)) for claim in claims]
        assert asked == ["watch"]
        await backend.release(writer)
        grants = await asyncio.gather(*(served(backend, *each) for each in zip(claims, turns, strict=True)))
    assert len({grant.token for grant in grants}) == 1
    assert asked.count("begin_phase") == 1
    assert asked.count("look_at_all") < 6
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
