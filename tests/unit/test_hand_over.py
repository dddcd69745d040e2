"""Leases that change hands, on virtual time: lost replies, late requests, cancellations, and several that resume."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from campaigns import amount
from inside import LoopClock, memory_on, on_clock
from virtual_time import in_virtual_time, now

from fencing_sdk import (
    BackendUnavailableError,
    ConfigurationError,
    FencingError,
    LeaseLostError,
    LeaseTicket,
    LockClient,
    LossReason,
    TicketRefusedError,
    UsageError,
    connect,
    current_lease,
)
from fencing_sdk._engine.acquisition import Terms
from fencing_sdk.abc import Claim, Permit
from fencing_sdk.abc.line import Line
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.events import Event, NotAcquiredReason
from fencing_sdk.recipes import beside
from fencing_sdk.testing import FaultyBackend

TTL = 10.0


class Place:
    """One client of a store in memory, on a network of its own."""

    def __init__(self, name: str, memory: MemoryBackend) -> None:
        self.name = name
        self.events: list[Event] = []
        self.net = FaultyBackend(memory, bells=False)
        self.locks: LockClient = on_clock(connect(self.net, observers=[self.events.append]), LoopClock())

    async def holder(self) -> str | None:
        held = await self.locks.inspect("deploy")
        return None if held is None else held.id


@asynccontextmanager
async def places(*names: str) -> AsyncIterator[list[Place]]:
    memory = memory_on(LoopClock(), tokens="counter")
    async with AsyncExitStack() as stack:
        made = [Place(name, memory) for name in names]
        for place in made:
            await stack.enter_async_context(place.locks)
        yield made


# What a process sees.


@in_virtual_time
async def test_the_block_that_detaches_ends_without_an_error_and_its_events_tell_where_the_lease_went():
    async with places("web", "worker") as (web, worker):
        async with web.locks.lock("deploy", ttl=TTL) as lease:
            ticket = await lease.detach(60)
            await asyncio.sleep(30)  # the body may go on: nothing cancels it
        async with worker.locks.resume(ticket, ttl=TTL) as resumed:
            await asyncio.sleep(300)  # the heartbeat carries it
            assert resumed.held
        with pytest.raises(TicketRefusedError):
            await worker.locks.resume(ticket).acquire()
        (released,) = [event for event in web.events if event.kind == "released"]
        assert (released.handed_to, released.confirmed, released.kept_for > 50) == (ticket.holder, True, True)
        (acquired,) = [event for event in worker.events if event.kind == "acquired"]
        assert acquired.resumed_from == ticket.holder
        assert [event.reason for event in worker.events if event.kind == "not_acquired"] == [NotAcquiredReason.REFUSED]


@in_virtual_time
async def test_max_hold_begins_anew_with_the_next_holder():
    async with places("web", "worker") as (web, worker):
        async with web.locks.lock("deploy", ttl=5, max_hold=8) as lease:
            await asyncio.sleep(6)
            ticket = await lease.detach(60)
        resumed = await worker.locks.resume(ticket, ttl=5, max_hold=8).acquire()
        await asyncio.sleep(6)
        assert resumed.held
        assert await resumed.wait_lost() is LossReason.EXPIRED


@in_virtual_time
async def test_a_lease_that_an_operator_has_ended_is_not_detached_and_its_block_says_so():
    async with places("web") as (web,):
        with pytest.raises(LeaseLostError, match="a test") as lost:
            async with web.locks.lock("deploy", ttl=TTL) as lease:
                await web.locks.revoke("deploy", token=lease.token, reason="a test")
                with contextlib.suppress(LeaseLostError):
                    await lease.detach(60)
        assert lost.value.reason is LossReason.REVOKED


@in_virtual_time
async def test_the_lease_of_a_job_or_beside_an_old_lock_is_not_detached_and_goes_on():
    class Old:
        async def take(self, owner: str, ttl: float) -> bool:
            return True

        async def renew(self, owner: str, ttl: float) -> bool:
            return True

        async def release(self, owner: str) -> None: ...

    async with places("web") as (web,):

        @web.locks.job("deploy", at_least_for=30, ttl=TTL)
        async def work() -> None:
            with pytest.raises(UsageError, match="that of a job"):
                await current_lease().detach(60)
            assert current_lease().held

        assert await work()
        async with beside(web.locks.lock("other", ttl=TTL), Old()) as lease:
            with pytest.raises(UsageError, match="one of them old"):
                await lease.detach(60)
            assert lease.held


@in_virtual_time
async def test_those_who_wait_keep_their_places_behind_the_ticket():
    async with places("web", "worker", "other") as (web, worker, other):
        lease = await web.locks.lock("deploy", ttl=TTL).acquire()
        order = []

        async def wait(name: str) -> None:
            async with other.locks.lock("deploy", ttl=TTL) as held:
                order.append((name, held.token))

        waiting = []
        for name in ("first", "second"):
            waiting.append(asyncio.create_task(wait(name)))
            await asyncio.sleep(1)
        ticket = await lease.detach(60)
        await asyncio.sleep(20)
        async with worker.locks.resume(ticket, ttl=TTL) as resumed:
            await asyncio.sleep(20)
            assert (order, len(await worker.locks.waiters("deploy"))) == ([], 2)
            token = resumed.token
        await asyncio.gather(*waiting)
        assert order == [("first", token + 1), ("second", token + 2)]


# Requests that are lost or late.


@in_virtual_time
async def test_a_store_that_is_silent_while_detaching_costs_the_lease_and_gets_the_lock_back():
    async with places("web", "other") as (web, other):
        lease = await web.locks.lock("deploy", ttl=TTL).acquire()
        web.net.lose_reply("renew")
        with pytest.raises(LeaseLostError, match="did not confirm the hand-over") as lost:
            await lease.detach(600)
        assert (lost.value.reason, lease.lost_reason) == (LossReason.EXPIRED, LossReason.EXPIRED)
        assert now() < TTL
        await asyncio.sleep(1)
        assert await other.holder() is None


@in_virtual_time
async def test_a_store_that_refuses_to_pass_on_gets_the_lock_back():
    async with places("web", "other") as (web, other):
        web.net.fail("renew", BackendRefusedError("Store", "transfer", "read-only"), times=1)
        with pytest.raises(BackendRefusedError, match="read-only"):
            async with web.locks.lock("deploy", ttl=TTL) as lease:
                await lease.detach(600)
        await asyncio.sleep(1)
        assert await other.holder() is None


@in_virtual_time
async def test_a_late_renewal_of_the_former_holder_shortens_nothing():
    async with places("web") as (web,):
        lease = await web.locks.lock("deploy", ttl=4, heartbeat_interval=1).acquire()
        web.net.straggle("renew", 8.0, times=1)
        await asyncio.sleep(1.05)  # the first renewal is on its way
        ticket = await lease.detach(60)
        await web.net.delivered()
        await asyncio.sleep(20)
        assert await web.holder() == ticket.holder
        assert (await web.locks.renew(ticket)).token == ticket.token


@in_virtual_time
async def test_a_late_release_and_a_late_draw_of_the_former_holder_end_nothing():
    async with places("web", "worker") as (web, worker):
        web.net.duplicate("acquire", 3.0, times=1)
        lease = await web.locks.lock("deploy", ttl=TTL).acquire()
        ticket = await lease.detach(60)
        await lease.release()
        async with worker.locks.resume(ticket, ttl=TTL) as resumed:
            await web.net.delivered()
            await asyncio.sleep(5)
            assert await worker.holder() == resumed.holder


@in_virtual_time
async def test_a_resume_whose_answer_comes_too_late_goes_on_with_the_owner_that_got_the_place():
    async with places("web", "worker") as (web, worker):
        ticket = await (await web.locks.lock("deploy", ttl=TTL).acquire()).detach(600)
        asked, pass_on = [], worker.net.pass_on

        async def slow(claim: Claim, heir: Claim) -> Any:
            place = await pass_on(claim, heir)
            if not asked:
                asyncio.get_running_loop().pass_time(9)  # the process stood still: past the deadline, within the ttl
            asked.append((heir.owner, place.token))
            return place

        vars(worker.net)["pass_on"] = slow
        async with worker.locks.resume(ticket, ttl=TTL) as resumed:
            assert resumed.remaining > 7
            assert resumed.token == ticket.token + 1
        assert asked[0] == asked[1]
        assert len(asked) == 2


@in_virtual_time
async def test_closing_the_client_while_it_detaches_gives_the_lock_back():
    async with places("web", "other") as (web, other):
        lease = await web.locks.lock("deploy", ttl=TTL).acquire()
        web.net.lose_reply("renew", silent=True)
        detaching = asyncio.create_task(lease.detach(600))
        await asyncio.sleep(0)
        await web.locks.aclose()
        with pytest.raises(LeaseLostError):
            await detaching
        assert now() < TTL
        assert await other.holder() is None


# Detached leases.


@in_virtual_time
async def test_a_take_without_an_answer_leaves_the_ticket_good_and_sends_no_release():
    async with places("shell") as (shell,):
        ticket = shell.locks.detached("deploy", ttl=60)
        shell.net.lose_reply("acquire")
        with pytest.raises(BackendUnavailableError):
            await shell.locks.take(ticket)
        shell.net.heal()
        await asyncio.sleep(5)
        assert await shell.holder() == ticket.holder
        assert "release" not in {operation for operation, _ in shell.net.calls}
        assert (await shell.locks.take(ticket)).token == 1


@in_virtual_time
async def test_a_take_that_is_cancelled_gives_back_what_it_may_have_got():
    async with places("shell", "other") as (shell, other):
        ticket = shell.locks.detached("deploy", ttl=60)
        shell.net.lose_reply("acquire", silent=True, times=1)
        taking = asyncio.create_task(shell.locks.take(ticket))
        await asyncio.sleep(1)
        assert await other.holder() == ticket.holder
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await asyncio.sleep(1)
        assert await other.holder() is None


@in_virtual_time
async def test_a_ticket_that_is_taken_is_not_renewed_by_the_client():
    async with places("shell", "other") as (shell, other):
        ticket = await shell.locks.take(shell.locks.detached("deploy", ttl=20))
        with pytest.raises(TicketRefusedError):
            await asyncio.sleep(19)
            assert await other.holder() == ticket.holder
            await asyncio.sleep(2)
            assert await other.holder() is None
            await shell.locks.renew(ticket)


@in_virtual_time
async def test_a_renewal_may_change_the_ttl_and_never_shortens():
    async with places("shell", "other") as (shell, other):
        ticket = await shell.locks.take(shell.locks.detached("deploy", ttl=20))
        ticket = await shell.locks.renew(ticket, ttl=600)
        await asyncio.sleep(500)
        assert await other.holder() == ticket.holder
        assert (await shell.locks.renew(ticket)).ttl == 600
        with pytest.raises(ConfigurationError, match="ttl must be"):
            await shell.locks.renew(ticket, ttl=100_000)


# The ticket itself.


def a_ticket(**fields: Any) -> LeaseTicket:
    return LeaseTicket("deploy/é", 60.0, "9f" * 16, **fields)


def test_a_ticket_survives_its_dump_and_shows_no_secret():
    for ticket in (
        a_ticket(),
        a_ticket(until=1.5, label='{"a": "b"}', namespace="billing"),
        a_ticket(mode=Permit(3), permit=2),
    ):
        text = ticket.dump()
        assert LeaseTicket.load(f"\n{text} ") == ticket
        assert pickle.loads(pickle.dumps(ticket)) == ticket
        assert len(text.split()) == 1
        assert text.isascii()
        for shown in (repr(ticket), str(ticket), f"{ticket}"):
            assert ticket.owner not in shown
            assert ticket.holder in shown


def test_a_ticket_that_was_cut_or_changed_anywhere_is_refused_and_never_shown():
    text = a_ticket(label="x" * 40).dump()
    cut = [text[:end] for end in range(len(text))]
    changed = [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(len(text) - 1)]
    for bad in (*cut, *changed, text + "A", text[0:20] + text[21:]):
        with pytest.raises(ConfigurationError, match="lease ticket") as refused:
            LeaseTicket.load(bad)
        assert text[10:30] not in str(refused.value)
        assert refused.value.__cause__ is None


def test_a_refusal_survives_pickling_and_hides_what_is_not_printable():
    error = TicketRefusedError("deploy", 35, LossReason.REVOKED, "no\nway")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "\n" not in str(error)
    assert (again.name, again.token, again.reason, again.detail) == ("deploy", 35, LossReason.REVOKED, "no\nway")


# Cancelled at any moment, and three that resume one ticket on a bad network.


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(amount(400, short=40)))
@in_virtual_time
async def test_a_detach_that_is_cancelled_leaves_a_ticket_or_a_free_lock(seed: int):
    dice = random.Random(seed)
    async with places("web", "other") as (web, other):
        lease = await web.locks.lock("deploy", ttl=5).acquire()
        spoil(web, dice)
        detaching = asyncio.create_task(lease.detach(300))
        await asyncio.sleep(dice.uniform(0, 2))
        detaching.cancel()
        (got,) = await asyncio.gather(detaching, return_exceptions=True)
        web.net.heal()
        await asyncio.sleep(25)
        assert (await other.holder() is not None) == isinstance(got, LeaseTicket)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(amount(400, short=40)))
@in_virtual_time
async def test_a_resume_that_is_cancelled_leaves_the_ticket_good_or_the_lock_free(seed: int):
    dice = random.Random(seed)
    async with places("web", "worker", "other") as (web, worker, other):
        ticket = await (await web.locks.lock("deploy", ttl=5).acquire()).detach(300)
        spoil(worker, dice)

        async def work() -> None:
            async with worker.locks.resume(ticket, ttl=5):
                await asyncio.sleep(0.1)

        working = asyncio.create_task(work())
        await asyncio.sleep(dice.uniform(0, 2))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        worker.net.heal()
        await asyncio.sleep(25)
        if await other.holder() is not None:
            assert await other.holder() == ticket.holder
            await (await other.locks.resume(ticket, ttl=5).acquire()).release()


def spoil(place: Place, dice: random.Random) -> None:
    """Let requests of a place be lost, late or doubled."""
    net = place.net
    for _ in range(2):
        operation, times = dice.choice(["renew", "release"]), dice.randint(1, 2)
        deeds: list[Callable[[], None]] = [
            lambda operation=operation, times=times: net.lose_reply(operation, times=times, silent=dice.random() < 0.5),
            lambda operation=operation, times=times: net.drop(operation, times=times),
            lambda operation=operation: net.straggle(operation, dice.uniform(0, 6), times=1),
            lambda operation=operation: net.duplicate(operation, dice.uniform(0, 9), times=1),
            lambda operation=operation: net.delay(operation, dice.uniform(0, 3), times=1),
        ]
        dice.choice(deeds)()


async def hand_overs(seed: int) -> list[tuple[float, str, int]]:
    """Let three of four places resume each ticket; return when which of them used which token."""
    dice, uses = random.Random(seed), []
    async with places(*"ABCD") as all_places:

        async def turn(place: Place, ticket: LeaseTicket) -> LeaseTicket | None:
            with contextlib.suppress(FencingError):
                lease = await place.locks.resume(ticket, ttl=4).acquire()
                until = now() + dice.uniform(0.1, 6)
                while now() < until:
                    uses.append((now(), place.name, int(lease.token)))
                    await asyncio.sleep(0.1)
                return await lease.detach(dice.choice([4, 8, 30]))
            return None

        ticket = None
        for _ in range(6):
            for place in all_places:
                place.net.heal()
            if ticket is None:
                with contextlib.suppress(FencingError):
                    lease = await all_places[0].locks.lock("deploy", ttl=4, wait=60).acquire()
                    ticket = await lease.detach(30)
                if ticket is None:
                    continue
            for place in all_places:
                if dice.random() < 0.6:
                    spoil(place, dice)
            tasks = [asyncio.create_task(turn(place, ticket)) for place in dice.sample(all_places, 3)]
            if dice.random() < 0.4:
                asyncio.get_running_loop().call_later(dice.uniform(0, 3), dice.choice(tasks).cancel)
            await asyncio.sleep(40)
            got = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if each is not None]
            tickets = [each for each in got if isinstance(each, LeaseTicket)]
            assert not [each for each in got if isinstance(each, Exception)], got
            assert len(tickets) <= 1, "two have detached what one ticket stood for"
            ticket = tickets[0] if tickets else None
    return uses


def faults_in(uses: list[tuple[float, str, int]]) -> int:
    """Count the uses of a token below a later one, and of one that another place has used."""
    faults, highest, users = 0, 0, {}
    for _, user, token in uses:
        faults += token < highest or users.setdefault(token, user) != user
        highest = max(highest, token)
    return faults


def play(seed: int) -> list[tuple[float, str, int]]:
    played: list[tuple[float, str, int]] = []

    @in_virtual_time
    async def run() -> None:
        played.extend(await hand_overs(seed))

    run()
    return played


@pytest.mark.campaign
def test_one_of_three_that_resume_a_ticket_uses_its_token():
    uses = 0
    for seed in range(amount(2000, short=60)):
        played = play(seed)
        uses += len(played)
        assert not faults_in(played), seed
    assert uses > 2000, "too little happened"


def caught(seeds: range) -> int:
    """Count the seeds in which something is wrong."""
    count = 0
    for seed in seeds:
        try:
            count += faults_in(play(seed)) > 0
        except AssertionError:
            count += 1
    return count


def test_a_ticket_that_is_adopted_without_a_new_owner_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The control: clients do that which take over the owner id of another process."""

    def adopted(terms: Terms) -> Claim:
        owner = None if terms.resumes is None else terms.resumes.owner
        return Claim(terms.store_name, terms.timing.ttl, owner, terms.label, terms.mode)

    monkeypatch.setattr(Terms, "claim", adopted)
    assert caught(range(12)) >= 8


def test_a_store_that_passes_on_whatever_holds_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The control: the comparison of the owner is what makes one of several resumers go on."""
    sound = Line.pass_on

    def careless(line: Line, owner: str, heir: Claim, at: float, address: object = None) -> Any:
        held = line.settle(at)
        return sound(line, held[0].owner if held else owner, heir, at, address)

    monkeypatch.setattr(Line, "pass_on", careless)
    assert caught(range(12)) >= 8
