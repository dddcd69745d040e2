"""Operators list holders and waiters and revoke a grant, never a later one; a grant passes to another owner."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import (
    LOCK,
    READER,
    WRITER,
    Busy,
    Claim,
    Grant,
    Holder,
    Mode,
    Permit,
    Renewal,
    Revoked,
    Waiting,
)
from fencing_sdk.abc import SupportsLine, SupportsRevoking, SupportsTransfer
from fencing_sdk.errors import LeaseLostError, LossReason
from fencing_sdk.testing.promises.under_test import NAME, BackendUnderTest, PowerfulBackend, Reopen, in_line, needs

REASON = "deploy 42 hangs"


@needs("lists")
class ListingPromises(BackendUnderTest):
    """For backends that declare ``lists``."""

    async def listed(self, backend: PowerfulBackend, prefix: str = "", limit: int = 100) -> list[Holder]:
        """Every holder of the names that begin with *prefix*, page by page."""
        page = await backend.list_holders(prefix, None, limit)
        found = list(page.holders)
        while page.cursor is not None:
            page = await backend.list_holders(prefix, page.cursor, limit)
            found += page.holders
        return found

    async def line(self, backend: PowerfulBackend, length: int) -> list[Waiting]:
        """The waiters of the lock, as soon as there are so many."""
        async with self.soon():
            while True:
                if len(found := await backend.list_waiters(NAME)) == length:
                    return list(found)
                await asyncio.sleep(0.01)

    async def test_what_is_held_is_listed_as_inspect_shows_it(self, backend: PowerfulBackend) -> None:
        """Name, token, holder, label; what was released is not there."""
        held, released = self.claim("a/1", label="host 7"), self.claim("a/2")
        token = await self.granted(backend, held)
        await self.granted(backend, released)
        await backend.release(released)
        (found,) = await self.listed(backend)
        assert (found.name, found.token, found.id, found.label) == ("a/1", token, held.holder, "host 7")
        assert 0 < found.remaining <= held.ttl + 1
        assert found.held_for is None or 0 <= found.held_for < 60

    async def test_inspect_tells_the_age_of_a_grant_as_the_listing_does(self, backend: PowerfulBackend) -> None:
        """Both know it, or neither does: an operator sees a lock in the listing, and looks closer."""
        await self.granted(backend, self.claim())
        (listed,) = await self.listed(backend)
        shown = await backend.inspect(NAME)
        assert shown is not None
        assert _same_age(listed, shown)

    @needs("shares")
    async def test_holders_tells_the_age_of_every_share_as_the_listing_does(self, backend: PowerfulBackend) -> None:
        """A permit alone and beside others, readers, and what inspect returns of them."""
        for name, mode, count in (("one", Permit(3), 1), ("two", Permit(3), 2), ("readers", READER, 2)):
            for _ in range(count):
                await self.granted(backend, Claim(name, 60.0, mode=mode))
            listed = {holder.id: holder for holder in await self.listed(backend, name)}
            shown, found = await backend.inspect(name), await backend.holders(name)
            assert shown is not None
            assert len(found) == len(listed) == count
            assert all(_same_age(listed[holder.id], holder) for holder in (shown, *found))

    async def test_the_prefix_chooses_and_its_characters_mean_themselves(self, backend: PowerfulBackend) -> None:
        """A prefix is not a pattern."""
        for name in ("a*b/1", "a*b/2", "axb/1", "a", "A*b/1", "a%b", "a_b", "a[*]b/1"):
            await self.granted(backend, self.claim(name))
        assert {holder.name for holder in await self.listed(backend, "a*b/")} == {"a*b/1", "a*b/2"}
        assert {holder.name for holder in await self.listed(backend, "a[*]")} == {"a[*]b/1"}
        assert {holder.name for holder in await self.listed(backend, "a_")} == {"a_b"}

    async def test_every_page_goes_on_where_the_last_one_ended(self, backend: PowerfulBackend) -> None:
        """All that are held from begin to end are listed, although others are released and acquired meanwhile."""
        stays = {f"stays/{number}" for number in range(40)}
        goes = [self.claim(f"goes/{number}") for number in range(40)]
        for name, other in zip(sorted(stays), goes, strict=True):
            await self.granted(backend, self.claim(name))
            await self.granted(backend, other)
        page, listed = await backend.list_holders("", None, 7), set[str]()
        for pages in range(1000):
            listed |= {holder.name for holder in page.holders}
            if page.cursor is None:
                break
            if goes:
                await backend.release(goes.pop())
                await self.granted(backend, self.claim(f"new/{pages}"))
            page = await backend.list_holders("", page.cursor, 7)
        assert stays <= listed

    @needs("queues")
    async def test_waiters_are_listed_in_the_order_of_the_line(self, backend: PowerfulBackend) -> None:
        """With the public digests of their owners; the holder is not among them."""
        async with LockClient(backend) as locks, locks.lock(NAME) as lease:
            tasks: list[asyncio.Task[object]] = []
            line: list[Waiting] = []
            for place in range(1, 4):
                tasks.append(asyncio.create_task(locks.lock(NAME).acquire()))
                line = await self.line(backend, place)
            assert lease.holder not in {waiter.id for waiter in line}
            (holder,) = await self.listed(backend)
            assert holder.waiters in {None, 3}
            tasks.pop(0).cancel()
            assert [waiter.id for waiter in await self.line(backend, 2)] == [waiter.id for waiter in line[1:]]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def test_a_lock_without_waiters_has_none(self, backend: PowerfulBackend) -> None:
        """Held or free."""
        assert list(await backend.list_waiters(NAME)) == []
        await self.granted(backend, self.claim())
        assert list(await backend.list_waiters(NAME)) == []

    @needs("shares")
    async def test_every_permit_and_every_reader_is_listed(self, backend: PowerfulBackend) -> None:
        """One by one, with mode and number."""
        for number in range(3):
            await self.granted(backend, Claim("permits", 60.0, mode=Permit(3)))
            await self.granted(backend, Claim("readers", 60.0, label=str(number), mode=READER))
        found = await self.listed(backend)
        assert sorted(holder.permit for holder in found if holder.permit is not None) == [0, 1, 2]
        assert {holder.label for holder in found if holder.mode == READER} == {"0", "1", "2"}

    @needs("shares", "queues")
    async def test_holders_and_waiters_are_shown_in_their_modes_with_their_labels(
        self, backend: PowerfulBackend
    ) -> None:
        """A writer is not a lock, whether it holds or waits; so an operator sees who holds up whom, and why."""
        assert isinstance(backend, SupportsLine)
        modes = [LOCK, WRITER, READER, Permit(2)]
        for mode in modes:
            name = f"held/{mode.word}"
            await self.granted(backend, Claim(name, 60.0, label="holds", mode=mode))
            shown = await backend.inspect(name)
            assert shown is not None
            for holder in (shown, *await backend.holders(name), *await self.listed(backend, name)):
                assert (holder.mode, holder.label) == (mode, "holds")
        await self.granted(backend, self.claim())
        for mode in modes:
            async with in_line(backend, Claim(NAME, 60.0, label="waits", mode=mode)):
                (waiter,) = await self.line(backend, 1)
                assert (waiter.mode, waiter.label) == (mode, "waits")


@needs("revokes")
class RevokingPromises(BackendUnderTest):
    """For backends that declare ``revokes``."""

    async def test_a_revoked_grant_is_over_and_the_next_token_is_higher(self, backend: PowerfulBackend) -> None:
        """The lock is free at once; the former holder cannot renew, and hears of it."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        assert await backend.revoke(NAME, token, REASON) is True
        assert await self.renewed(backend, claim) in {Revoked(REASON), Renewal.REFUSED}
        assert await self.granted(backend, self.claim()) > token
        assert await self.renewed(backend, claim) in {Revoked(REASON), Renewal.TAKEN_OVER, Renewal.REFUSED}

    async def test_a_later_grant_is_never_revoked_for_an_earlier_one(self, backend: PowerfulBackend) -> None:
        """Another token than the one that is held changes nothing: an earlier, a later, or none."""
        former, claim = self.claim(), self.claim()
        seen = await self.granted(backend, former)
        await backend.release(former)
        assert await backend.revoke(NAME, seen, REASON) is False
        token = await self.granted(backend, claim)
        for other in (seen, token + 1, 0):
            assert await backend.revoke(NAME, other, REASON) is False
        assert await backend.revoke("another", token, REASON) is False
        assert await self.renewed(backend, claim) is Renewal.RENEWED

    async def test_a_grant_is_revoked_once(self, backend: PowerfulBackend, reopen: Reopen) -> None:
        """Exactly one of several operators takes it away, also when they use different clients."""
        token = await self.granted(backend, self.claim())
        async with aclosing(reopen()) as other:
            assert isinstance(other, SupportsRevoking)
            calls = [store.revoke(NAME, token, REASON) for store in (backend, other, backend)]
            assert sorted(await asyncio.gather(*calls)) == [False, False, True]

    async def test_the_holder_loses_its_lease_and_reads_the_reason(self, backend: PowerfulBackend) -> None:
        """The work is cancelled, also where another client revokes."""
        async with LockClient(backend) as locks, LockClient(backend) as operator:
            working = asyncio.create_task(_work(locks, 60.0, self.ttl))
            holder = await self.taken(backend)
            assert await operator.revoke(NAME, token=holder.token, reason=REASON)
            with pytest.raises(LeaseLostError) as lost:
                await asyncio.wait_for(working, self.patience)
        assert (lost.value.reason, lost.value.detail) == (LossReason.REVOKED, REASON)

    @needs("queues")
    async def test_the_next_waiter_gets_a_revoked_lock(self, backend: PowerfulBackend) -> None:
        """Without waiting for the ttl, and with a higher token."""
        claim = self.claim(ttl=3600)
        token = await self.granted(backend, claim)
        async with LockClient(backend) as locks:
            waiting = asyncio.create_task(locks.lock(NAME).acquire())
            await asyncio.sleep(0.1)
            assert await locks.revoke(NAME, token=token, reason=REASON)
            lease = await asyncio.wait_for(waiting, self.patience)
            assert lease.token > token
            await lease.release()

    @needs("queues", "notices")
    async def test_the_holder_is_told_although_its_own_client_gets_the_lock_next(
        self, backend: PowerfulBackend
    ) -> None:
        """Two tasks of one process may hold and wait."""
        async with LockClient(backend) as locks:
            lease = await locks.lock(NAME, ttl=3600).acquire()
            waiting = asyncio.create_task(locks.lock(NAME, ttl=3600).acquire())
            await asyncio.sleep(0.1)
            assert await locks.revoke(NAME, token=lease.token, reason=REASON)
            following = await asyncio.wait_for(waiting, self.patience)
            assert await asyncio.wait_for(lease.wait_lost(), self.patience) is LossReason.REVOKED
            await following.release()

    @needs("shares")
    async def test_one_permit_is_revoked_and_the_others_stay(self, backend: PowerfulBackend) -> None:
        """A permit has a token of its own."""
        claims = [Claim("gpu", 60.0, mode=Permit(2)) for _ in range(2)]
        tokens = [await self.granted(backend, claim) for claim in claims]
        assert await backend.revoke("gpu", tokens[0], REASON)
        assert await self.renewed(backend, claims[1]) is Renewal.RENEWED
        assert await self.renewed(backend, claims[0]) is not Renewal.RENEWED
        assert await self.granted(backend, Claim("gpu", 60.0, mode=Permit(2))) > max(tokens)

    async def test_the_release_of_a_revoked_grant_answers_as_its_renewal(self, backend: PowerfulBackend) -> None:
        """A holder that leaves before it has heard of the revocation learns it then, and why."""
        asked, released = self.claim("a"), self.claim("b")
        for claim in (asked, released):
            assert await backend.revoke(claim.name, await self.granted(backend, claim), REASON)
        assert await backend.release(released) == await self.renewed(backend, asked)


def _same_age(listed: Holder, shown: Holder) -> bool:
    """Return whether two answers agree on the moment of a grant. Seconds may be between them."""
    if listed.held_for is None or shown.held_for is None:
        return listed.held_for is shown.held_for
    return abs(listed.held_for - shown.held_for) < 60


async def _work(locks: LockClient, ttl: float, interval: float) -> None:
    async with locks.lock(NAME, ttl=ttl, heartbeat_interval=interval):
        await asyncio.Event().wait()


@needs("transfers")
class TransferPromises(BackendUnderTest):
    """For backends that declare ``transfers``."""

    async def passed(self, backend: SupportsTransfer, of: Claim, to: Claim) -> Grant:
        """Pass the grant on."""
        answer = await backend.transfer(of, to)
        assert isinstance(answer, Grant), answer
        return answer

    async def test_a_grant_passes_to_another_owner_under_a_higher_token(self, backend: PowerfulBackend) -> None:
        """The lock is never free in between; the ttl and the label are those of the heir."""
        of, to = self.claim(label="first"), self.claim(ttl=3600, label="second")
        token = await self.granted(backend, of)
        grant = await self.passed(backend, of, to)
        assert grant.token > token
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert (holder.token, holder.id, holder.label) == (grant.token, to.holder, "second")
        assert holder.remaining > self.ended_after(self.ttl)
        await self.refused(backend, self.claim())
        assert await self.renewed(backend, to) is Renewal.RENEWED

    async def test_what_the_former_owner_asks_late_changes_nothing(self, backend: PowerfulBackend) -> None:
        """Its renewal would set its own ttl again, and its release would free the lock."""
        of, to = self.claim(), self.claim(ttl=3600)
        await self.granted(backend, of)
        await self.passed(backend, of, to)
        assert isinstance(await self.renewed(backend, of), Revoked) or await self.renewed(backend, of) in _ENDED
        await backend.release(of)
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert holder.id == to.holder
        assert holder.remaining > 3500

    async def test_a_transfer_that_is_repeated_is_one_transfer(self, backend: PowerfulBackend) -> None:
        """Its answer may have been lost."""
        of, to = self.claim(), self.claim()
        await self.granted(backend, of)
        grant = await self.passed(backend, of, to)
        assert await self.passed(backend, of, to) == grant

    async def test_what_is_not_held_is_not_transferred(self, backend: PowerfulBackend) -> None:
        """Neither a free lock, nor one that another owner holds, nor one that has passed on already."""
        never, holder, heir, late = (self.claim() for _ in range(4))
        assert await backend.transfer(never, heir) in _ENDED
        await self.granted(backend, holder)
        assert await backend.transfer(never, heir) in _ENDED
        await self.passed(backend, holder, heir)
        assert not isinstance(await backend.transfer(holder, late), Grant)
        assert await self.renewed(backend, heir) is Renewal.RENEWED

    @needs("revokes")
    async def test_an_heir_that_an_operator_has_ended_is_told_why(self, backend: PowerfulBackend) -> None:
        """The reason comes when the heir asks again, because its first answer was lost."""
        of, to = self.claim(), self.claim()
        await self.granted(backend, of)
        grant = await self.passed(backend, of, to)
        assert await backend.revoke(NAME, grant.token, "deploy 42 hangs")
        assert await backend.transfer(of, to) == Revoked("deploy 42 hangs")

    @needs("queues")
    async def test_waiters_keep_their_places_when_a_grant_passes_on(self, backend: PowerfulBackend) -> None:
        """No room was freed, so no waiter is granted; the release of the heir lets the first one in."""
        of, to, waiter = (self.claim(ttl=3600) for _ in range(3))
        await self.granted(backend, of)
        async with in_line(backend, waiter):
            await self.passed(backend, of, to)
            assert isinstance(await backend.acquire(waiter), Busy)
            await backend.release(to)
            async with self.soon():
                while not isinstance(await backend.acquire(waiter), Grant):
                    pass
        await backend.release(waiter)

    @needs("shares")
    async def test_a_share_passes_on_with_its_mode_and_its_number(self, backend: PowerfulBackend) -> None:
        """A permit under a higher token; a reader keeps the token that it shares."""
        grants: dict[str, tuple[Grant, Grant]] = {}
        for name, mode in (("pool", Permit(of=2)), ("page", READER)):
            others, of, to = (_claim(name, mode) for _ in range(3))
            await self.granted(backend, others)
            first = await backend.acquire(of)
            assert isinstance(first, Grant)
            grants[name] = first, await self.passed(backend, of, to)
            shown = [(holder.id, holder.mode) for holder in await backend.holders(name)]
            assert set(shown) == {(others.holder, mode), (to.holder, mode)}
        former, permit = grants["pool"]
        assert permit.token > former.token
        assert permit.permit == former.permit == 1
        former, reader = grants["page"]
        assert reader.token == former.token


_ENDED = (Renewal.REFUSED, Renewal.TAKEN_OVER)


def _claim(name: str, mode: Mode) -> Claim:
    return Claim(name, 60.0, mode=mode)
