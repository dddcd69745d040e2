"""
Permits, readers and writers of two clients: lost answers, tries at the same moment, and whom a release lets sleep.

What one call after the other is answered is in `BackendSuite` and in `tests.oracle`. The scenarios are written once. A
store that shares runs them by a subclass with a fixture ``bench``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

import pytest
from stays import PATIENCE
from store_bench import WaitersBench, nothing_left

from fencing_sdk.abc import READER, WRITER, Busy, Claim, Grant, Mode, Permit, Renewal
from fencing_sdk.backends import from_url
from fencing_sdk.testing.promises.under_test import StandingClaim, in_line

MODES = [Permit(of=2), READER, WRITER]
NAME = "a"
_ROUNDS = 10


def claim_of(mode: Mode, *, ttl: float = 60.0) -> Claim:
    return Claim(NAME, ttl, mode=mode)


async def granted(backend: Any, claim: Claim) -> Grant:
    outcome = await backend.acquire(claim)
    assert isinstance(outcome, Grant), outcome
    return outcome


async def served(backend: Any, claim: Claim, turn: StandingClaim, tries: Counter[str] | None = None) -> Grant:
    """Wait for the turn by wake-ups alone."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if tries is not None:
                tries[claim.owner] += 1
            if isinstance(outcome := await backend.acquire(claim), Grant):
                return outcome
            await turn.wait()


class SharesSuite:
    """What permits, readers and writers see of each other, and of lost answers."""

    @pytest.fixture
    async def backend(self, bench: WaitersBench) -> AsyncIterator[Any]:
        async with aclosing(from_url(bench.url)) as made:
            yield made

    @pytest.fixture
    async def rival(self, bench: WaitersBench) -> AsyncIterator[Any]:
        async with aclosing(from_url(bench.url)) as made:
            yield made

    @pytest.fixture(autouse=True)
    async def _leaves_nothing(self, bench: WaitersBench) -> AsyncIterator[None]:
        """Set up before the clients, it looks when they are closed."""
        yield
        await nothing_left(bench)

    async def lose_answer(self, backend: Any, claim: Claim) -> None:
        """Let the store carry out the step that grants *claim*, and its answer be lost."""
        assert isinstance(await backend.acquire(claim), Grant)

    # Lost answers

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
    async def test_a_share_whose_answer_was_lost_is_found_again(self, mode: Mode, backend: Any, rival: Any):
        claim, earlier = claim_of(mode), claim_of(READER)
        if not mode.shared:  # the grant ends what readers have left, where they leave something
            await granted(backend, earlier)
            await backend.release(earlier)
        await self.lose_answer(backend, claim)
        grant = await granted(backend, claim)
        again = await granted(backend, claim)
        assert (again.token, again.permit) == (grant.token, grant.permit)
        assert list(await backend.renew([claim])) == [Renewal.RENEWED]
        await backend.release(claim)
        assert list(await rival.holders(NAME)) == []

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
    async def test_a_waiter_whose_grant_was_not_answered_has_it(self, mode: Mode, backend: Any, rival: Any):
        holder, claim = claim_of(WRITER if mode.shared else READER), claim_of(mode)
        await granted(rival, holder)
        async with in_line(backend, claim) as turn:
            assert isinstance(await backend.acquire(claim), Busy)
            await rival.release(holder)
            async with asyncio.timeout(PATIENCE):
                await turn.wait()
            await self.lose_answer(backend, claim)
            grant = await granted(backend, claim)
        (shown,) = await rival.holders(NAME)
        assert (shown.token, shown.permit, shown.id) == (grant.token, grant.permit, claim.holder)
        assert list(await backend.renew([claim])) == [Renewal.RENEWED]
        await backend.release(claim)
        assert list(await rival.holders(NAME)) == []

    # Tokens

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
    async def test_a_share_keeps_its_token_and_its_number_when_another_client_goes_on_with_it(
        self, mode: Mode, backend: Any, rival: Any
    ):
        """Also with another ttl, which some stores keep in another place."""
        before, claim = claim_of(WRITER), claim_of(mode)
        await granted(backend, before)
        async with in_line(backend, claim) as turn:
            await backend.release(before)
            grant = await served(backend, claim, turn)
        longer = Claim(claim.name, 90.0, claim.owner, mode=mode)
        assert list(await backend.renew([longer])) == [Renewal.RENEWED]
        assert list(await rival.renew([longer])) == [Renewal.RENEWED]
        for other in (rival, backend):
            again = await granted(other, longer)
            assert (again.token, again.permit) == (grant.token, grant.permit)
        await rival.release(longer)
        assert list(await backend.holders(NAME)) == []

    # Waiters

    @pytest.mark.parametrize("mode", [Permit(of=2), READER], ids=lambda mode: mode.word)
    async def test_a_share_that_has_not_asked_again_is_shown_as_a_waiter(self, mode: Mode, backend: Any, rival: Any):
        """Although its turn has come."""
        writer, claim = claim_of(WRITER), claim_of(mode)
        await granted(rival, writer)
        async with in_line(backend, claim) as turn:
            await rival.release(writer)
            async with asyncio.timeout(PATIENCE):
                await turn.wait()
            assert list(await rival.holders(NAME)) == []
            assert list((await rival.list_holders(NAME, None, 10)).holders) == []
            assert [one.id for one in await rival.list_waiters(NAME)] == [claim.holder]
            await served(backend, claim, turn)
        assert [one.id for one in await rival.holders(NAME)] == [claim.holder]
        await backend.release(claim)

    async def test_readers_that_try_at_the_same_moment_pass_no_writer(self, backend: Any, rival: Any):
        before, writer = claim_of(WRITER), claim_of(WRITER)
        early, late = ([claim_of(READER, ttl=ttl) for ttl in (30.0, 60.0, 90.0)] for _ in range(2))
        await granted(rival, before)
        async with AsyncExitStack() as line:
            turns = {}
            for claim in (*early, writer, *late):
                turns[claim] = await line.enter_async_context(in_line(backend, claim))
            for outcome in await asyncio.gather(*map(backend.acquire, (*early, *late, writer))):
                assert isinstance(outcome, Busy)
            await rival.release(before)
            entering = [asyncio.create_task(served(backend, claim, turns[claim])) for claim in early]
            for _ in range(2):  # together with those that are let in, and after them
                for outcome in await asyncio.gather(*map(backend.acquire, late)):
                    assert isinstance(outcome, Busy)
                entered = await asyncio.gather(*entering)
                assert isinstance(await backend.acquire(writer), Busy)  # a sign of life: it keeps its place
            assert [shown.token for shown in await rival.holders(NAME)] == [entered[0].token] * 3
            for claim in early:
                await backend.release(claim)
            assert entered[0].token < (await served(backend, writer, turns[writer])).token
            await backend.release(writer)
            followed = await asyncio.gather(*(served(backend, claim, turns[claim]) for claim in late))
            assert len({grant.token for grant in followed}) == 1
            assert list(await backend.renew(late)) == [Renewal.RENEWED] * 3
            for claim in late:
                await backend.release(claim)

    async def test_readers_that_try_at_the_same_moment_wait_for_a_permit(self, backend: Any, rival: Any):
        permit, readers = claim_of(Permit(of=2)), [claim_of(READER) for _ in range(3)]
        await granted(rival, permit)
        async with AsyncExitStack() as line:
            turns = [await line.enter_async_context(in_line(backend, claim)) for claim in readers]
            for outcome in await asyncio.gather(*map(backend.acquire, readers)):
                assert isinstance(outcome, Busy)
            await rival.release(permit)
            await asyncio.gather(*(served(backend, *each) for each in zip(readers, turns, strict=True)))
        for claim in readers:
            await backend.release(claim)

    @pytest.mark.parametrize("steps", range(1, 13))
    async def test_readers_that_give_up_while_they_are_let_in_keep_nothing(self, steps: int, backend: Any, rival: Any):
        """However far their tries have come: the others are let in, and the writer after them."""
        writer, claims = claim_of(WRITER), [claim_of(READER) for _ in range(8)]
        await granted(rival, writer)

        async def read(claim: Claim) -> Grant:
            try:
                async with in_line(backend, claim) as turn:
                    joined.release()
                    await let_in.wait()
                    return await served(backend, claim, turn)
            except asyncio.CancelledError:  # also while it leaves the line, with its grant
                await backend.release(claim)
                raise

        joined, let_in = asyncio.Semaphore(0), asyncio.Event()
        reading = [asyncio.create_task(read(claim)) for claim in claims]
        for _ in claims:
            await joined.acquire()
        await rival.release(writer)
        let_in.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in reading[::2]:
            task.cancel()
        outcomes = await asyncio.gather(*reading, return_exceptions=True)
        stayed = {claim for claim, outcome in zip(claims, outcomes, strict=True) if isinstance(outcome, Grant)}
        assert stayed >= set(claims[1::2])
        assert {shown.id for shown in await rival.holders(NAME)} == {claim.holder for claim in stayed}
        for claim in stayed:
            await backend.release(claim)
        last = claim_of(WRITER)
        await granted(rival, last)
        await rival.release(last)

    async def test_tries_at_the_same_moment_get_all_permits_that_are_free(self, backend: Any, rival: Any):
        """None is refused because the one ahead has not got its number yet."""
        for _ in range(_ROUNDS):
            claims = [((backend, rival)[number % 2], claim_of(Permit(of=4))) for number in range(4)]
            outcomes = await asyncio.gather(*(client.acquire(claim) for client, claim in claims))
            assert {outcome.permit for outcome in outcomes if isinstance(outcome, Grant)} == {0, 1, 2, 3}
            for client, claim in claims:
                await client.release(claim)

    async def test_a_permit_that_is_released_lets_the_others_in_line_sleep(self, backend: Any):
        """The first is served with its number. Those behind the second have not asked since they joined."""
        held, claims = [claim_of(Permit(of=2)) for _ in range(2)], [claim_of(Permit(of=2)) for _ in range(5)]
        for claim in held:
            await granted(backend, claim)
        tries: Counter[str] = Counter()
        async with AsyncExitStack() as line:
            tasks = []
            for claim in claims:
                turn = await line.enter_async_context(in_line(backend, claim))
                tasks.append(asyncio.create_task(served(backend, claim, turn, tries)))
            await self._all_have_asked(claims, tries)
            asked = tries.copy()
            await backend.release(held[1])
            assert (await tasks[0]).permit == 1
            assert [tries[claim.owner] - asked[claim.owner] for claim in claims[2:]] == [0, 0, 0]
            assert not any(task.done() for task in tasks[1:])
            await backend.release(held[0])
            assert (await tasks[1]).permit == 0
            assert not any(task.done() for task in tasks[2:])
            for task in tasks[2:]:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        for claim in claims[:2]:
            await backend.release(claim)

    @staticmethod
    async def _all_have_asked(claims: list[Claim], tries: Counter[str]) -> None:
        """And have been refused, as far as can be told: no more of them ask."""
        async with asyncio.timeout(PATIENCE):
            before: Counter[str] = Counter()
            while tries != before or len(tries) < len(claims):
                before = tries.copy()
                await asyncio.sleep(0.1)
