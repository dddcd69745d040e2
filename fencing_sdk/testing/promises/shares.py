"""Shares: permits with numbers, readers that hold together, writers that hold alone, and their one line."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

from fencing_sdk._client import LockClient
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._values.claim import LOCK, READER, WRITER, Busy, Claim, Grant, Mode, Permit, Renewal
from fencing_sdk.abc import Backend, SupportsLine
from fencing_sdk.testing.promises.under_test import (
    TRIES,
    BackendUnderTest,
    PowerfulBackend,
    Reopen,
    in_line,
    needs,
)

POOL = "gpu-pool"
CATALOG = "catalog"
_READERS = 20
_ALL_PAIRS = (READER, LOCK, WRITER, Permit(2), LOCK, READER, WRITER, LOCK, Permit(2), READER, Permit(2), WRITER, READER)
"""Each mode follows each other one somewhere."""


@needs("shares")
class SharePromises(BackendUnderTest):
    """Who may hold beside whom, with which number and which token. For backends that declare ``shares``."""

    # Permits

    async def test_as_many_permits_are_granted_as_there_are(self, backend: Backend, reopen: Reopen) -> None:
        """Each holder has a number of its own, from 0 on, and a higher token than the one before it."""
        async with aclosing(reopen()) as other:
            grants = [await self._granted(client, self._permit(3)) for client in (backend, other, backend)]
            assert [grant.permit for grant in grants] == [0, 1, 2]
            self.assert_rising([grant.token for grant in grants])
            await self.refused(other, self._permit(3))

    async def test_a_permit_that_was_released_is_granted_again(self, backend: Backend) -> None:
        """The lowest free number, with a token above every earlier one of the name."""
        claims = [self._permit(3) for _ in range(3)]
        tokens = [(await self._granted(backend, claim)).token for claim in claims]
        await backend.release(claims[1])
        await backend.release(claims[1])
        again = await self._granted(backend, self._permit(3))
        assert again.permit == 1
        self.assert_rising([*tokens, again.token])
        await self.refused(backend, self._permit(3))

    async def test_a_permit_ends_with_its_own_ttl(self, backend: Backend) -> None:
        """Its number is free then, and the other permits go on."""
        short, long = self._permit(2, ttl=self.ttl), self._permit(2)
        await self._granted(backend, short)
        kept = await self._granted(backend, long)  # with the number of the short one, if that has ended already
        await self.expire(self.ttl)
        assert await self.renewed(backend, short) is not Renewal.RENEWED
        again = await self._granted(backend, self._permit(2))
        assert {again.permit, kept.permit} == {0, 1}
        assert again.token > kept.token
        assert await self.renewed(backend, long) is Renewal.RENEWED
        await self.refused(backend, self._permit(2))

    async def test_clients_may_disagree_on_the_number_of_permits(self, backend: Backend) -> None:
        """As during a rolling deployment: no number has two holders, and the largest number bounds them all."""
        numbers = [(await self._granted(backend, self._permit(of))).permit for of in (2, 2)]
        await self.refused(backend, self._permit(2))
        numbers.append((await self._granted(backend, self._permit(3))).permit)
        assert numbers == [0, 1, 2]
        await self.refused(backend, self._permit(3))

    async def test_permits_exclude_a_lock_of_that_name(self, backend: Backend) -> None:
        """And the other way round."""
        permit = self._permit(2)
        await self._granted(backend, permit)
        await self.refused(backend, self.claim(POOL))
        await backend.release(permit)
        await self.granted(backend, self.claim(POOL))
        await self.refused(backend, self._permit(2))

    # Readers and writers

    async def test_readers_hold_together_and_share_a_token(self, backend: Backend, reopen: Reopen) -> None:
        """With a token for each, a guard that has seen the second one would refuse the first, which holds as well."""
        async with aclosing(reopen()) as other:
            tokens = {(await self._granted(client, self._reader())).token for client in (backend, other, backend)}
        assert len(tokens) == 1

    async def test_a_writer_holds_alone(self, backend: Backend) -> None:
        """Until the last reader has left; and no reader holds beside it."""
        readers, writer = [self._reader() for _ in range(2)], self._writer()
        for reader in readers:
            await self._granted(backend, reader)
        for reader in readers:
            await self.refused(backend, writer)
            await backend.release(reader)
        await self._granted(backend, writer)
        await self.refused(backend, self._reader())
        await self.refused(backend, self._writer())

    async def test_a_writer_is_above_the_readers_before_it_and_below_those_after_it(self, backend: Backend) -> None:
        """So one fence refuses the zombies of both."""
        tokens = []
        for mode in (READER, WRITER, READER, WRITER, WRITER, READER):
            claim = self._claim(CATALOG, mode)
            tokens.append((await self._granted(backend, claim)).token)
            await backend.release(claim)
        self.assert_rising(tokens)

    async def test_a_reader_that_died_keeps_no_writer_out(self, backend: Backend) -> None:
        """Its share ends with its own ttl, and a reader that goes on keeps the writer out until it leaves."""
        dead, alive = self._reader(ttl=self.ttl), self._reader()
        await self._granted(backend, dead)
        await self._granted(backend, alive)
        await self.expire(self.ttl)
        await self.refused(backend, self._writer())
        await backend.release(alive)
        await self._granted(backend, self._writer())

    # Tokens of all modes

    async def test_tokens_grow_across_all_modes(self, backend: Backend, reopen: Reopen) -> None:
        """Locks, readers, writers and permits of one name have one row of tokens, so that one fence fits all."""
        tokens = []
        async with aclosing(reopen()) as other:
            for number, mode in enumerate(_ALL_PAIRS):
                client, claim = (backend, other)[number % 2], self._claim(CATALOG, mode)
                tokens.append((await self._granted(client, claim)).token)
                await client.release(claim)
        self.assert_rising(tokens)

    async def test_readers_that_come_after_dead_ones_are_above_a_grant_between(self, backend: Backend) -> None:
        """A reader that died ended nothing. What others are granted after it ends its phase."""
        modes = (LOCK, WRITER, Permit(2))
        rows = {mode: [await self._read_and_left(backend, mode)] for mode in modes}
        await self.expire(self.ttl)
        for mode, tokens in rows.items():
            claim = self._claim(mode.word, mode)
            tokens.append((await self._granted(backend, claim)).token)
            await backend.release(claim)
            tokens.append((await self._granted(backend, self._claim(mode.word, READER))).token)
            self.assert_rising(tokens)

    async def _read_and_left(self, backend: Backend, mode: Mode) -> int:
        return (await self._granted(backend, self._claim(mode.word, READER, ttl=self.ttl))).token

    @needs("queues")
    async def test_tokens_grow_across_all_modes_in_line(self, backend: PowerfulBackend, reopen: Reopen) -> None:
        """In the order of the grants, whatever happened to the name since a waiter came; and each grant has one."""
        holder, tokens = self._claim(CATALOG, LOCK), []
        tokens.append((await self._granted(backend, holder)).token)
        claims = [self._claim(CATALOG, mode) for mode in _ALL_PAIRS]
        async with aclosing(reopen()) as other, AsyncExitStack() as line:
            clients = [(backend, other)[number % 2] for number in range(len(claims))]
            turns = []
            for client, claim in zip(clients, claims, strict=True):
                assert isinstance(client, SupportsLine)
                turns.append(await line.enter_async_context(in_line(client, claim)))
            await backend.release(holder)
            for client, claim, turn in zip(clients, claims, turns, strict=True):
                tokens.append(token := await self._served(client, claim, turn))
                await self._has_one_token(client, claim, token)
                await client.release(claim)
        self.assert_rising(tokens)

    async def _has_one_token(self, backend: Backend, claim: Claim, token: int) -> None:
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        assert (await self._granted(backend, claim)).token == token
        shown = await backend.inspect(claim.name)
        assert shown is not None
        assert (shown.token, shown.id, shown.mode.word) == (token, claim.holder, claim.mode.word)

    # Every share

    async def test_the_same_owner_again_has_the_same_share(self, backend: Backend) -> None:
        """A retry whose first answer got lost finds its token and its number."""
        for claim in (self._permit(3), self._reader(), self._claim("records", WRITER)):
            grant = await self._granted(backend, claim)
            again = await self._granted(backend, claim)
            assert (again.token, again.permit) == (grant.token, grant.permit)

    async def test_a_share_is_renewed_for_itself_alone(self, backend: Backend) -> None:
        """One that was released is not revived by a renewal, nor by that of another share."""
        other = await self._kept_beyond_its_ttl(backend)
        await self.expire(self.ttl)
        assert await self.renewed(backend, other) is not Renewal.RENEWED
        await self._granted(backend, self._writer())

    async def _kept_beyond_its_ttl(self, backend: Backend) -> Claim:
        """Renew a reader beside one that was released; start again if the machine was slower than the ttl."""
        for _ in range(TRIES):
            one, other = self._reader(ttl=self.ttl), self._reader(ttl=self.ttl)
            await self._granted(backend, one)
            renewed_at = self.now()
            await self._granted(backend, other)
            await backend.release(one)
            for _ in range(3):
                asked_at = self.now()
                outcomes = list(await backend.renew([one, other]))
                assert outcomes[0] is Renewal.REFUSED
                if outcomes[1] is not Renewal.RENEWED:
                    break
                renewed_at = asked_at
                await self.pass_time(self.ttl * 0.6)
            outcome = await backend.acquire(rival := self._writer())
            if isinstance(outcome, Busy):
                return other
            assert self.now() >= self.lasted_until(renewed_at, self.ttl), "a reader that was renewed has ended"
            await backend.release(rival)
        msg = f"this machine needs longer than ttl = {self.ttl} for one renewal; declare a longer one"
        raise AssertionError(msg)

    async def test_a_release_frees_one_share(self, backend: Backend) -> None:
        """Not that of another owner, whether it is repeated or comes from an owner that holds nothing."""
        mine, other = self._reader(), self._reader()
        await self._granted(backend, mine)
        await self._granted(backend, other)
        await backend.release(self._reader())
        await backend.release(mine)
        await backend.release(mine)
        await self.refused(backend, self._writer())
        assert await self.renewed(backend, other) is Renewal.RENEWED

    async def test_the_release_of_a_share_answers_whether_its_owner_had_one(self, backend: Backend) -> None:
        """Alone or beside others; what a renewal would have answered, if it had none."""
        for name, mode in (("pool", Permit(2)), ("catalog", READER), ("records", WRITER)):
            mine, other, never = (self._claim(name, mode) for _ in range(3))
            await self._granted(backend, mine)
            if mode.shared:
                await self._granted(backend, other)
                assert await backend.release(never) is await self.renewed(backend, never)
                assert await backend.release(other) is None
                assert await backend.release(other) is await self.renewed(backend, other)
            assert await backend.release(mine) is None
            assert await backend.release(mine) is Renewal.REFUSED

    async def test_holders_shows_every_share(self, backend: PowerfulBackend) -> None:
        """Mode, permit, token, public holder, label and the seconds that are left; never the owner."""
        assert list(await backend.holders(POOL)) == []
        claims = [self._claim(POOL, Permit(of=3), label=text) for text in ("one", "two")]
        grants = [await self._granted(backend, claim) for claim in claims]
        found = list(await backend.holders(POOL))
        assert [(one.name, one.token, one.id, one.permit, one.label) for one in found] == [
            (POOL, grant.token, claim.holder, grant.permit, claim.label)
            for claim, grant in zip(claims, grants, strict=True)
        ]
        assert {one.mode.word for one in found} == {"permit"}
        assert all(0 < one.remaining <= claim.ttl for one, claim in zip(found, claims, strict=True))
        assert not any(claim.owner in repr(found) for claim in claims)
        shown = await backend.inspect(POOL)
        assert shown is not None
        assert (shown.token, shown.id) in {(one.token, one.id) for one in found}

    async def test_holders_shows_readers_a_writer_and_a_lock(self, backend: PowerfulBackend) -> None:
        """All of the readers, the one writer, the one holder of a lock; and nothing when they have left."""
        for name, mode, count in (("r", READER, 3), ("w", WRITER, 1), ("l", LOCK, 1)):
            claims = [self._claim(name, mode) for _ in range(count)]
            for claim in claims:
                await self._granted(backend, claim)
            found = list(await backend.holders(name))
            assert {one.id for one in found} == {claim.holder for claim in claims}
            assert {one.mode.word for one in found} <= ({mode.word} if mode.shared else {WRITER.word, LOCK.word})
            for claim in claims:
                await backend.release(claim)
            assert list(await backend.holders(name)) == []
            assert await backend.inspect(name) is None

    async def test_a_client_holds_permits_and_readers(self, backend: Backend) -> None:
        """Recipes beside plain locks: numbers, tokens, renewals, and nothing left afterwards."""
        async with self.soon(), LockClient(backend) as locks:
            gpus, catalog = locks.semaphore(POOL, permits=2, ttl=60), locks.rwlock(CATALOG, ttl=60)
            async with gpus as one, locks.lock("invoices/42") as lock, catalog.reader as reader:
                two, other = await gpus.acquire(wait=self.patience), await catalog.reader.try_acquire()
                assert other is not None
                assert {one.permit, two.permit} == {0, 1}
                assert other.token == reader.token
                assert await gpus.try_acquire() is None
                assert await catalog.writer.try_acquire() is None
                for lease in (one, two, reader, other, lock):
                    await lease.renew()
                assert len(await gpus.holders()) == len(await catalog.holders()) == 2
                await two.release()
                await other.release()
            async with catalog.writer as writer:
                assert writer.token > _token_of(reader)
            assert list(await gpus.holders()) == list(await catalog.holders()) == []

    # The line

    @needs("queues")
    async def test_readers_that_come_later_wait_behind_a_writer(self, backend: PowerfulBackend) -> None:
        """Or writers would starve where readers follow each other."""
        reader, writer = self._reader(), self._writer()
        await self._granted(backend, reader)
        async with in_line(backend, writer) as turn:
            await self.refused(backend, writer)
            await self.refused(backend, self._reader())
            await backend.release(reader)
            await self._served(backend, writer, turn)
        await self.refused(backend, self._reader())

    @needs("queues")
    async def test_all_readers_in_line_are_let_in_by_one_release(
        self, backend: PowerfulBackend, reopen: Reopen
    ) -> None:
        """Wake-ups alone do it: a reader that is let in passes the turn on to the reader behind it."""
        writer = self._writer()
        await self._granted(backend, writer)
        readers = [self._reader() for _ in range(_READERS)]
        async with aclosing(reopen()) as other, AsyncExitStack() as line, self.soon():
            waiting = []
            for number, reader in enumerate(readers):
                client = (backend, other)[number % 2]
                assert isinstance(client, SupportsLine)
                turn = await line.enter_async_context(in_line(client, reader))
                waiting.append(asyncio.create_task(self._served(client, reader, turn)))
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting)
            await backend.release(writer)
            tokens = await asyncio.gather(*waiting)
        assert len(set(tokens)) == 1

    @needs("queues")
    async def test_a_writer_that_gives_up_lets_the_readers_behind_it_in(self, backend: PowerfulBackend) -> None:
        """They fit beside those who hold already: no release will wake them."""
        await self._granted(backend, self._reader())
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(in_line(backend, self._writer()))
            behind = self._reader()
            async with in_line(backend, behind) as turn:
                served = asyncio.create_task(self._served(backend, behind, turn))
                await asyncio.sleep(0.02)
                assert not served.done()
                await leaving.aclose()
                async with self.soon():
                    await served

    @needs("queues")
    async def test_each_permit_that_is_released_lets_one_waiter_in(self, backend: PowerfulBackend) -> None:
        """In the order of arrival, also while other permits are held."""
        held = [self._permit(2) for _ in range(2)]
        for claim in held:
            await self._granted(backend, claim)
        waiters = [self._permit(2) for _ in range(3)]
        async with AsyncExitStack() as line:
            turns = [await line.enter_async_context(in_line(backend, claim)) for claim in waiters]
            for released, waiter, turn in zip((*held, *waiters), waiters, turns, strict=False):
                served = asyncio.create_task(self._served(backend, waiter, turn))
                await asyncio.sleep(0.02)
                assert not served.done()
                await backend.release(released)
                await served

    @needs("queues")
    async def test_two_permits_that_are_released_at_once_let_two_in(self, backend: PowerfulBackend) -> None:
        """The first waiter is woken by a release, the second one by the release or by the first."""
        held = [self._permit(2) for _ in range(2)]
        for claim in held:
            await self._granted(backend, claim)
        waiters = [self._permit(2) for _ in range(2)]
        async with AsyncExitStack() as line, self.soon():
            served = []
            for claim in waiters:
                turn = await line.enter_async_context(in_line(backend, claim))
                served.append(asyncio.create_task(self._served(backend, claim, turn)))
            await asyncio.sleep(0.02)
            await asyncio.gather(*(backend.release(claim) for claim in held))
            await asyncio.gather(*served)

    @needs("queues")
    async def test_a_newcomer_takes_no_permit_from_the_line(self, backend: PowerfulBackend) -> None:
        """The permit is free, and kept for the head of the line."""
        held = self._permit(1)
        await self._granted(backend, held)
        head = self._permit(1)
        async with in_line(backend, head) as turn:
            await self.refused(backend, head)
            await backend.release(held)
            await self.refused(backend, self._permit(1))
            await self._served(backend, head, turn)

    # What they are written with.

    def _claim(self, name: str, mode: Mode, *, ttl: float = 60.0, label: str | None = None) -> Claim:
        return Claim(name, ttl, label=label, mode=mode)

    def _permit(self, of: int, *, ttl: float = 60.0) -> Claim:
        return self._claim(POOL, Permit(of=of), ttl=ttl)

    def _reader(self, *, ttl: float = 60.0) -> Claim:
        return self._claim(CATALOG, READER, ttl=ttl)

    def _writer(self) -> Claim:
        return self._claim(CATALOG, WRITER)

    async def _granted(self, backend: Backend, claim: Claim) -> Grant:
        outcome = await backend.acquire(claim)
        assert isinstance(outcome, Grant), f"expected a grant of {claim.name!r} as a {claim.mode.word}, got {outcome}"
        assert (outcome.permit is None) == (claim.mode.word != "permit"), f"a {claim.mode.word} with {outcome.permit}"
        return outcome


def _token_of(lease: Lease) -> int:
    """The token of a lease that is over."""
    return state_of(lease).number
