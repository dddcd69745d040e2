"""
Leases that no process carries, and leases that change hands, for tasks and for threads.

One of those that resume a ticket goes on, each change of hands has a higher token, and nothing that the former holder
sends ends what follows. The scenarios are written once. A store runs them by a subclass with a fixture ``bench``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from both_worlds import Waiting, at_once, comes, in_the_loop
from campaigns import amount
from hand_over_processes import Campaign
from inside import read_facts
from stays import PATIENCE, Stay, eventually, opened, staying
from store_bench import WaitersBench

import fencing_sdk
import fencing_sdk.sync
from fencing_sdk import (
    ConfigurationError,
    DrainingError,
    LeaseLostError,
    LeaseTicket,
    LockHeldError,
    LossReason,
    StaleTokenError,
    TicketRefusedError,
)
from fencing_sdk.backends import from_url
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

FAR = {"ttl": 60.0, "heartbeat_interval": 15.0}
"""A lease that no heartbeat renews while a test runs."""

Scenario = Callable[[Any, Any], Awaitable[None]]
Play = Callable[..., Awaitable[None]]


class InBothWorlds:
    """Plays scenarios with two clients of one store, in both worlds."""

    short_ttl = 0.3
    """Seconds of a ticket that is left to run out; at least the store's minimum."""

    @pytest.fixture(params=["tasks", "threads"])
    def play(self, request: pytest.FixtureRequest, bench: WaitersBench) -> Play:
        def store() -> Any:
            return MemoryBackend() if bench.url == "memory://" else bench.url

        async def with_tasks(scenario: Any, options: dict[str, Any]) -> None:
            async with AsyncExitStack() as stack:
                one = await stack.enter_async_context(fencing_sdk.connect(store(), **options))
                other = one
                if bench.url != "memory://":  # which two clients do not share
                    other = await stack.enter_async_context(fencing_sdk.connect(store(), **options))
                await scenario(one, other)

        def with_threads(scenario: Any, options: dict[str, Any]) -> None:
            with ExitStack() as stack:
                one = stack.enter_context(fencing_sdk.sync.connect(store(), **options))
                other = one
                if bench.url != "memory://":
                    other = stack.enter_context(fencing_sdk.sync.connect(store(), **options))
                at_once(scenario(Waiting(one), Waiting(other)))

        async def play(scenario: Scenario, **options: Any) -> None:
            if request.param == "tasks":
                await with_tasks(scenario, options)
            else:
                await asyncio.to_thread(with_threads, scenario, options)

        return play


class TicketsSuite(InBothWorlds):
    """A ticket holds a lock for no process in particular."""

    async def test_a_ticket_holds_until_it_is_released(self, play):
        async def scenario(one, other):
            ticket = await one.take(one.detached("a", ttl=60, label="deploy 7"))
            assert ticket.token is not None
            assert [holder.id for holder in await other.holders("a")] == [ticket.holder]
            assert await other.lock("a").try_acquire() is None
            again = await other.renew(ticket.dump())
            assert (again.token, again.owner) == (ticket.token, ticket.owner)
            await other.release(again)
            await one.release(ticket)
            async with other.lock("a", ttl=60, wait=PATIENCE) as lease:
                assert lease.token > ticket.token
                await one.release(ticket)  # late, and again: it ends nothing of another holder
                assert [holder.id for holder in await one.holders("a")] == [lease.holder]

        await play(scenario)

    async def test_a_ticket_whose_answer_was_lost_finds_what_it_got(self, play):
        async def scenario(one, other):
            written = one.detached("a", ttl=60)
            first = await one.take(written)  # whose process was killed before it could write this down
            found = await other.take(LeaseTicket.load(written.dump()))
            assert (found.token, found.holder) == (first.token, written.holder)
            assert (await other.renew(written)).token == first.token
            await one.release(written)

        await play(scenario)

    async def test_a_ticket_is_not_taken_while_another_holds(self, play):
        async def scenario(one, other):
            async with one.lock("a", ttl=60):
                with pytest.raises(LockHeldError):
                    await other.take(other.detached("a"))
            await other.release(await other.take(other.detached("a"), wait=PATIENCE))

        await play(scenario)

    async def test_others_see_that_no_process_carries_it(self, play):
        async def scenario(one, other):
            ticket = await one.take(one.detached("a", ttl=60, label="deploy 7"))
            (seen,) = await other.holders("a")
            facts = read_facts(seen)
            assert facts.detached_until is not None
            assert facts.state == f"detached until {facts.detached_until}, nothing runs"
            assert (facts.text, ticket.label) == ("deploy 7", "deploy 7")
            await one.release(ticket)

        await play(scenario)

    async def test_an_operator_ends_it_and_the_ticket_says_why(self, play):
        async def scenario(one, other):
            ticket = await one.take(one.detached("a", ttl=60))
            assert await other.revoke("a", token=ticket.token, reason="wrong cluster")
            for ask in (one.renew, one.take):
                with pytest.raises(TicketRefusedError, match="operator took the lock away: wrong cluster") as refused:
                    await ask(ticket)
                assert refused.value.reason is LossReason.REVOKED

        await play(scenario)

    async def test_a_ticket_that_ran_out_or_was_released_is_refused_and_names_the_holder(self, play):
        async def scenario(one, other):
            ticket = await one.take(one.detached("a", ttl=self.short_ttl))

            async def free() -> bool:
                return not await other.holders("a")

            await comes(free)
            with pytest.raises(TicketRefusedError, match=r"it ran out$") as refused:
                await one.renew(ticket)
            assert refused.value.reason is LossReason.EXPIRED
            spent = await one.take(one.detached("a", ttl=60))
            await one.release(spent)
            with pytest.raises(TicketRefusedError, match="used or released before, or it is of another store"):
                await one.renew(spent)
            async with other.lock("a", ttl=60, wait=PATIENCE) as lease:
                with pytest.raises(TicketRefusedError) as refused:
                    await one.renew(spent)
                assert refused.value.reason is LossReason.HANDED_OVER
                assert refused.value.detail == f"{lease.holder} (token {lease.token})"

        await play(scenario)

    async def test_a_client_that_drains_takes_nothing_and_keeps_what_is_detached(self, play):
        async def scenario(one, other):
            ticket = await one.take(one.detached("a", ttl=60))
            assert await one.drain(within=0)
            with pytest.raises(DrainingError):
                await one.take(one.detached("b"))
            ticket = await one.renew(ticket)
            assert [holder.id for holder in await other.holders("a")] == [ticket.holder]
            await one.release(ticket)

        await play(scenario)


class HandOverSuite(InBothWorlds):
    """A lease goes from one client to another, by its ticket."""

    async def test_a_lease_goes_on_in_another_client_with_a_higher_token(self, play):
        async def scenario(one, other):
            guard, tokens = MemoryGuard(), []
            async with one.lock("a", **FAR) as lease:
                tokens.append(lease.token)
                ticket = await lease.detach(600)
                tokens.append(ticket.token)
                with pytest.raises(LeaseLostError, match="handed over by its ticket") as lost:
                    lease.check()
                assert lost.value.reason is LossReason.HANDED_OVER
                assert (lease.held, lease.lost_reason) == (False, None)
            assert await one.lock("a").try_acquire() is None
            async with other.resume(ticket.dump(), fences=[guard], **FAR) as resumed:
                tokens.append(resumed.token)
                assert tokens == sorted(set(tokens))
                for former in tokens[:2]:
                    with pytest.raises(StaleTokenError):
                        await in_the_loop(other, lambda former=former: guard.raise_to("a", former))
                assert await one.lock("a").try_acquire() is None
            async with one.lock("a", wait=PATIENCE, **FAR) as later:
                assert later.token > tokens[-1]

        await play(scenario)

    async def test_one_of_those_that_resume_a_ticket_goes_on(self, play):
        async def scenario(one, other):
            async with one.lock("a", **FAR) as lease:
                ticket = await lease.detach(600)
            async with one.resume(ticket, **FAR) as resumed:
                for ask in (
                    other.resume(ticket, **FAR).acquire,
                    lambda: other.renew(ticket),
                    lambda: other.take(ticket),
                ):
                    with pytest.raises(TicketRefusedError) as refused:
                        await ask()
                    assert refused.value.reason is LossReason.HANDED_OVER
                    assert refused.value.detail == f"{resumed.holder} (token {resumed.token})"
                await other.release(ticket)
                assert [holder.id for holder in await other.holders("a")] == [resumed.holder]

        await play(scenario)

    async def test_a_ticket_that_was_released_revoked_or_ran_out_is_not_resumed(self, play):
        async def scenario(one, other):
            async def refused(keep: float, deed: Callable[[LeaseTicket], Awaitable[Any]]) -> LossReason:
                async with one.lock("a", wait=PATIENCE, **FAR) as lease:
                    ticket = await lease.detach(keep)
                await deed(ticket)
                with pytest.raises(TicketRefusedError) as error:
                    await other.resume(ticket).acquire()
                return error.value.reason

            async def ran_out(_: LeaseTicket) -> None:
                async def free() -> bool:
                    return not await other.holders("a")

                await comes(free)

            async def revoked(ticket: LeaseTicket) -> None:
                assert await one.revoke("a", token=ticket.token, reason="a test")

            assert await refused(600, one.release) is LossReason.REFUSED
            assert await refused(600, revoked) is LossReason.REVOKED
            assert await refused(self.short_ttl, ran_out) is LossReason.EXPIRED

        await play(scenario)

    async def test_a_ticket_is_taken_detached_resumed_and_detached_again(self, play):
        async def scenario(one, other):
            ticket, tokens = await one.take(one.detached("a", ttl=60, label="deploy 7")), []
            for locks in (one, other, one):
                async with locks.resume(ticket, **FAR) as lease:
                    (seen,) = await other.holders("a")
                    assert read_facts(seen).detached_until is None
                    tokens += [ticket.token, lease.token]
                    ticket = await lease.detach()
                (seen,) = await other.holders("a")
                assert read_facts(seen).detached_until is not None
            assert tokens == sorted(set(tokens))
            await other.release(ticket)

        await play(scenario)

    async def test_permits_readers_and_writers_go_on_as_what_they_are(self, play):
        async def scenario(one, other):
            permits = one.semaphore("pool", permits=2, wait=PATIENCE, **FAR)
            async with permits as first, permits as second:
                ticket = await second.detach(600)
                assert (ticket.permit, ticket.mode.word) == (second.permit, "permit")
                async with other.resume(ticket, **FAR) as resumed:
                    assert (resumed.permit, first.permit) == (1, 0)
                    assert resumed.resource == "pool/1"
                    assert resumed.token > ticket.token
            both = one.rwlock("catalog", **FAR)
            stays, leaves = await both.reader.acquire(), await other.rwlock("catalog", **FAR).reader.acquire()
            ticket = await leaves.detach(600)
            async with other.resume(ticket, **FAR) as resumed:
                assert (ticket.token, resumed.token) == (stays.token, stays.token)
                assert {holder.mode.word for holder in await one.holders("catalog")} == {"reader"}
            await stays.release()
            async with both.writer as writer:
                ticket = await writer.detach(600)
            async with other.resume(ticket, **FAR) as resumed:
                assert resumed.token > ticket.token

        await play(scenario)

    async def test_a_client_that_drains_and_closes_leaves_the_ticket_good(self, play):
        async def scenario(one, other):
            async with one.lock("a", **FAR) as lease:
                ticket = await lease.detach(600)
            assert await one.drain(within=0)
            with pytest.raises(DrainingError):
                await one.resume(ticket).acquire()
            if one is not other:
                await (one.close() if isinstance(one, Waiting) else one.aclose())
                async with other.resume(ticket, **FAR) as resumed:
                    assert resumed.token > ticket.token

        await play(scenario)

    async def test_a_bad_keep_or_ticket_is_refused_and_changes_nothing(self, play):
        async def scenario(one, other):
            async with one.lock("a", **FAR) as lease:
                for keep in (2 * 86_400, 0.01, -1, "60", True):
                    with pytest.raises(ConfigurationError, match="keep must be"):
                        await lease.detach(keep)
                text = (await lease.detach(600)).dump()
            for bad in (text[:-1], text[:40], text.upper(), "fencing1.", "", "deploy", None, 7):
                for use in (other.resume, other.renew, other.release, other.take):
                    with pytest.raises(ConfigurationError, match="lease ticket") as error:
                        await use(bad)
                    assert text[12:40] not in str(error.value)
            async with other.resume(f"  {text}\n", **FAR) as resumed:
                assert resumed.held

        await play(scenario)

    async def test_a_ticket_of_another_namespace_is_refused(self, play):
        async def scenario(one, other):
            async with one.lock("a", **FAR) as lease:
                ticket = await lease.detach(600)
            assert ticket.namespace == "billing"
            async with other.resume(ticket, **FAR) as resumed:
                assert resumed.name == "a"

        await play(scenario, namespace="billing")

    @pytest.fixture
    async def faulty(self, bench: WaitersBench) -> AsyncIterator[tuple[FaultyBackend, Any]]:
        backend = FaultyBackend(MemoryBackend() if bench.url == "memory://" else from_url(bench.url))
        async with fencing_sdk.connect(backend) as locks:
            yield backend, locks

    async def test_a_detach_and_a_resume_are_one_request_each(self, faulty):
        backend, locks = faulty
        async with locks.lock("a", **FAR) as lease:
            backend.calls.clear()
            ticket = await lease.detach(600)
        assert backend.calls == [("renew", ("a",))], "the block sent something, or a detach is more than a pass_on"
        async with locks.resume(ticket, **FAR):
            assert backend.calls == [("renew", ("a",))] * 2

    async def test_a_lost_reply_is_repeated_and_changes_hands_once(self, faulty):
        backend, locks = faulty
        backend.lose_reply("renew", times=1)
        async with locks.lock("a", **FAR) as lease:
            ticket = await lease.detach(600)
        assert [holder.token for holder in await locks.holders("a")] == [ticket.token]
        backend.lose_reply("renew", times=2)
        async with locks.resume(ticket, **FAR) as resumed:
            assert [holder.token for holder in await locks.holders("a")] == [resumed.token]
        assert backend.calls.count(("renew", ("a",))) == 5
        assert not await locks.holders("a")

    async def test_a_detach_that_is_cancelled_leaves_the_lock_free(self, faulty):
        backend, locks = faulty
        backend.lose_reply("renew", times=1, silent=True)
        lease = await locks.lock("a", ttl=60, heartbeat_interval=1).acquire()
        detaching = asyncio.create_task(lease.detach(600))

        async def passed_on() -> bool:
            (seen,) = await locks.holders("a")
            return seen.id != lease.holder

        await eventually(passed_on, what="the place was passed on")
        detaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await detaching
        async with locks.lock("a", wait=PATIENCE, **FAR):
            assert not lease.held


class HandOverInLineSuite:
    """Waiters keep their places when a lease changes hands."""

    async def test_a_waiter_keeps_its_place_behind_the_ticket(self, bench: WaitersBench):
        async with opened(bench.url) as (one, _), opened(bench.url) as (other, _):
            async with staying(one.lock("a", **FAR)) as holding:
                waiter = Stay(other.lock("a", ttl=60, wait=PATIENCE))
                await bench.waiting("a", 1)
                late = Stay(one.lock("a", ttl=60, wait=PATIENCE))
                await bench.waiting("a", 2)
                ticket = await holding.lease.detach(600)
                await holding.end()
            async with staying(other.resume(ticket, **FAR)) as resumed:
                assert await bench.in_line("a") == 2
                assert not waiter.entered.is_set()
                await resumed.end()
            await waiter.begun()
            assert not late.entered.is_set()
            assert waiter.token > resumed.token
            await waiter.end()
            await late.begun()
            await late.end()


class HandOverProcessesSuite:
    """Processes that resume one ticket together, on a machine that kills and stops some of them."""

    @pytest.mark.slow
    @pytest.mark.campaign
    async def test_one_of_the_processes_that_resume_a_ticket_goes_on(self, bench: WaitersBench, tmp_path: Path):
        campaign = Campaign(bench.url, tmp_path, seed=random.SystemRandom().randrange(2**32))
        await campaign.play(amount(10_000, short=40))
        uses, below, shared = campaign.faults_in_uses()
        assert (campaign.double, below, shared) == (0, 0, 0)
        assert uses >= campaign.handed
        assert campaign.refusals[LossReason.HANDED_OVER] > 0


class NoHandOverSuite(InBothWorlds):
    """A store whose tickets do not change hands says so, and the lease goes on."""

    async def test_a_lease_is_not_detached_and_goes_on(self, play):
        async def scenario(one, other):
            async with one.lock("a", **FAR) as lease:
                with pytest.raises(UnsupportedError, match=r"detached leases|cannot hand a lease over"):
                    await lease.detach(600)
                assert lease.held
                assert await other.lock("a").try_acquire() is None

        await play(scenario)
