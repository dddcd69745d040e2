"""An election: one leader for one term after the other, whatever ends the terms."""

import asyncio
import contextlib
import json
import os
from functools import partial

import anyio
import pytest
from inside import LoopClock, held_here, memory_on, on_clock
from looking import holder
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import (
    BackendRefusedError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LossReason,
    StaleTokenError,
    UsageError,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Acquiring, Lost, NotAcquired
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.recipes import Election, ElectionStanding
from fencing_sdk.testing import FaultyBackend

TTL = 10.0


class TwoProcesses:
    """Two clients that stand in one election. The network of ours has faults."""

    def __init__(self, *, in_line: bool = True) -> None:
        self.store = memory_on(LoopClock(), tokens="counter")
        self.network = FaultyBackend(self.store)
        self.events = []
        ours = self.store if in_line else self.network
        self.ours = on_clock(LockClient(ours, observers=[self.events.append]), LoopClock())
        self.theirs = on_clock(LockClient(self.store), LoopClock())
        self.log: list[tuple[object, ...]] = []

    async def __aenter__(self):
        await self.theirs.__aenter__()
        await self.ours.__aenter__()
        return self

    async def __aexit__(self, *_):
        await self.ours.aclose()
        await self.theirs.aclose()

    def election(self, **options) -> Election:
        return self.ours.election("scheduler", **({"ttl": TTL} | options))

    async def lead(self, election: Election, seconds: float = 3600, terms: int = 100) -> None:
        """Stand for some terms, and lead for some seconds in each."""
        async for term in election:
            async with term as lease:
                self.log.append(("leads", now(), int(lease.token)))
                try:
                    await asyncio.sleep(seconds)
                finally:
                    self.log.append(("ends", now()))
            terms -= 1
            if not terms:
                break

    async def next_leader(self) -> float:
        async for term in self.theirs.election("scheduler", ttl=TTL):
            async with term:
                self.log.append(("next leads", now()))
                return now()
        raise AssertionError("drained")


def tidy() -> bool:
    """Return whether neither a lease nor a cancellation is left on this task."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() == 0 and not held_here()


@in_virtual_time
async def test_one_leads_and_the_other_waits_for_its_turn():
    async with TwoProcesses() as two:
        leading = asyncio.create_task(two.lead(two.election(), seconds=50, terms=1))
        await asyncio.sleep(1)
        assert await two.next_leader() == 50
        await leading
        assert two.log == [("leads", 0, 1), ("ends", 50), ("next leads", 50)]


@in_virtual_time
async def test_a_lost_lead_cancels_the_body_and_the_loop_leads_again_with_a_higher_token():
    async with TwoProcesses() as two:
        election = two.election()
        leading = asyncio.create_task(two.lead(election))
        await asyncio.sleep(2)
        assert election.leading
        two.store.take_away("scheduler")
        await asyncio.sleep(0)
        assert not election.leading, "at once, and not when the body has ended"
        assert election.standing is ElectionStanding.ENDING
        await asyncio.sleep(1)
        assert two.log == [("leads", 0, 1), ("ends", 2), ("leads", 2, 2)]
        assert election.leading
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading
        assert await holder(two.store, "scheduler") is None


@in_virtual_time
async def test_a_term_that_ends_too_late_is_over_and_no_error():
    async with TwoProcesses() as two:
        tokens = []
        async for term in two.election():
            async with term as lease:
                tokens.append(int(lease.token))
                if len(tokens) == 1:
                    asyncio.get_running_loop().pass_time(TTL + 1)  # blocked: the body ends without having noticed
                    continue
            break
        assert tokens == [1, 2]
        await settle()
        assert [event.reason for event in two.events if isinstance(event, Lost)] == [LossReason.STALLED]
        assert tidy()


@in_virtual_time
async def test_an_outage_of_the_store_is_ridden_out(caplog):
    async with TwoProcesses(in_line=False) as two:
        election = two.election()
        leading = asyncio.create_task(two.lead(election))
        await asyncio.sleep(1)
        for call in ("acquire", "renew", "release"):
            two.network.hang(call)
        await asyncio.sleep(TTL)
        assert two.log == [("leads", 0, 1), ("ends", pytest.approx(7.9, abs=0.1))], "by the deadline"
        await asyncio.sleep(200)
        assert not leading.done()
        assert election.standing is ElectionStanding.UNAVAILABLE
        assert await election.leader() is None
        two.network.heal()
        healed = now()
        await asyncio.sleep(TTL)
        assert two.log[2][0] == "leads"
        assert two.log[2][1] - healed <= TTL, "it went on asking"
        assert election.standing is ElectionStanding.LEADING
        assert "trying again" in caplog.text
        leading.cancel()


@in_virtual_time
async def test_pauses_in_an_outage_grow_from_a_tenth_of_a_second_to_five():
    async with TwoProcesses(in_line=False) as two:
        two.network.fail("acquire")
        standing = asyncio.create_task(two.lead(two.election(ttl=1)))
        await asyncio.sleep(100)
        ended = [event.at for event in two.events if isinstance(event, NotAcquired)]
        began = [event.at for event in two.events if isinstance(event, Acquiring)][1:]
        pauses = [begin - end for begin, end in zip(began, ended, strict=False)]
        assert 0.05 <= pauses[0] <= 0.1
        assert all(pause <= 5 for pause in pauses)
        assert pauses[-1] >= 2.5
        standing.cancel()


@pytest.mark.parametrize("refusal", [BackendRefusedError("Store", "acquire"), ZeroDivisionError()])
@in_virtual_time
async def test_what_is_no_outage_leaves_the_loop(refusal):
    async with TwoProcesses(in_line=False) as two:
        two.network.fail("acquire", refusal)
        with pytest.raises(type(refusal)):
            await two.lead(two.election())
        assert tidy()


@in_virtual_time
async def test_a_fence_that_has_seen_a_later_token_leaves_the_loop():
    guard = MemoryGuard()
    await guard.raise_to("scheduler", 7)
    async with TwoProcesses() as two:
        with pytest.raises(StaleTokenError):
            await two.lead(two.election(fences=[guard]))
        assert await holder(two.store, "scheduler") is None


@in_virtual_time
async def test_a_closed_client_leaves_the_loop():
    async with TwoProcesses() as two, two.theirs.lock("scheduler"):
        standing = asyncio.create_task(two.lead(two.election()))
        await asyncio.sleep(1)
        await two.ours.aclose()
        with pytest.raises(UsageError, match="closed"):
            await standing


# The body's own ends


@in_virtual_time
async def test_tasks_of_the_body_that_read_the_token_too_late_are_no_error_either():
    async with TwoProcesses() as two:
        for others, swallowed in (([], True), ([ValueError()], False)):
            with contextlib.nullcontext() if swallowed else pytest.raises(ExceptionGroup) as left:
                async for term in two.election():
                    async with term as lease:
                        late = LeaseLostError(lease.name, int(lease.token), LossReason.EXPIRED)
                        raise ExceptionGroup("of a task group", [late, late, *others])
                    break
            assert swallowed or len(left.value.exceptions) == 3, "all of it leaves"


@pytest.mark.parametrize("moment", ["candidate", "leader"])
@in_virtual_time
async def test_an_outer_timeout_ends_the_loop(moment):
    async with TwoProcesses() as two, two.theirs.lock("scheduler" if moment == "candidate" else "other"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await two.lead(two.election())
        assert now() == 5
        with anyio.move_on_after(5) as scope:
            await two.lead(two.election())
        assert scope.cancelled_caught
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@in_virtual_time
async def test_an_outer_cancellation_wins_over_the_end_of_the_term():
    async with TwoProcesses() as two:
        election = two.election()

        def both(leading: asyncio.Task[None], first: str) -> None:
            calls = [leading.cancel, election.resign]
            for call in calls if first == "cancelled" else reversed(calls):
                call()

        async def cleans_up() -> None:
            async for term in election:
                async with term:
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        await asyncio.sleep(1)

        leading = asyncio.create_task(cleans_up())
        await asyncio.sleep(1)
        leading.cancel()
        await asyncio.sleep(0.5)
        election.resign()  # whose cancellation is the one that the block sees last
        with pytest.raises(asyncio.CancelledError):
            await leading
        for first in ("cancelled", "resigned"):
            leading = asyncio.create_task(two.lead(election))
            await asyncio.sleep(1)
            both(leading, first)
            with pytest.raises(asyncio.CancelledError):
                await leading


# A term that is not entered


async def _leave_by_break(election) -> None:
    async for _ in election:
        break


async def _leave_by_return(election) -> None:
    async for _ in election:
        return


async def _leave_by_an_error(election) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in election:
            raise ZeroDivisionError


async def _leave_by_a_cancellation(election) -> None:
    with anyio.move_on_after(1.0):
        async for _ in election:
            await asyncio.sleep(10)


@pytest.mark.parametrize("leave", [_leave_by_break, _leave_by_return, _leave_by_an_error, _leave_by_a_cancellation])
@in_virtual_time
async def test_a_term_that_is_not_entered_when_its_loop_is_left_is_released_at_once(leave, caplog):
    async with TwoProcesses() as two:
        election = two.election()
        before = now()
        await leave(election)
        assert await two.next_leader() <= (1.0 if leave is _leave_by_a_cancellation else 0.0)
        assert now() - before < TTL
        assert not election.leading
        assert election.standing is ElectionStanding.IDLE
        assert "not entered" in caplog.text


@in_virtual_time
async def test_a_term_is_entered_right_after_its_loop_or_not_at_all():
    async with TwoProcesses() as two:
        async for term in two.election():  # noqa: B007  (used below)
            break
        async with term as lease:
            await asyncio.sleep(2 * TTL)
            lease.check()
        async for term in two.election():  # noqa: B007  (used below)
            break
        await asyncio.sleep(0.1)
        with pytest.raises(UsageError, match="not entered before its loop was left, so its lock was released"):
            await term.__aenter__()


@in_virtual_time
async def test_a_term_whose_loop_is_kept_is_released_after_a_ttl(caplog):
    async with TwoProcesses() as two:
        loop = aiter(two.election())
        term = await anext(loop)
        assert await asyncio.create_task(two.next_leader()) == pytest.approx(TTL)
        assert "not entered within one ttl" in caplog.text
        with pytest.raises(UsageError, match="not entered within one ttl, so its lock was released"):
            await term.__aenter__()
        with pytest.raises(UsageError, match="not entered within one ttl"):
            await anext(loop)


@in_virtual_time
async def test_a_lead_that_is_lost_before_the_term_is_entered_is_no_error():
    async with TwoProcesses() as two:
        terms = []
        async for term in two.election():
            if not terms:
                two.store.take_away("scheduler")
                await asyncio.sleep(0)
            async with term as lease:
                terms.append(lease.held)
                await asyncio.sleep(0)
                terms.append(lease.held)
                break
        assert terms == [False, True, True]


# Resigning


@in_virtual_time
async def test_a_leader_that_resigns_cleans_up_under_its_lease_and_stands_again_behind_the_others():
    async with TwoProcesses() as two:
        election = two.election()
        held = []

        async def leads() -> None:
            async for term in election:
                async with term as lease:
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await asyncio.sleep(2 * TTL)
                        held.append(lease.held)

        leading = asyncio.create_task(leads())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(two.next_leader())
        await asyncio.sleep(1)
        election.resign()
        assert election.leading, "the lock is not released yet"
        assert election.standing is ElectionStanding.ENDING
        assert await waiting == 22
        assert held == [True]
        await asyncio.sleep(2)
        assert election.standing is ElectionStanding.LEADING, "it stands again"
        leading.cancel()


async def test_to_resign_on_a_client_that_is_not_open_is_an_error():
    with pytest.raises(UsageError, match="not open"):
        LockClient(MemoryBackend()).election("scheduler").resign()


@in_virtual_time
async def test_a_term_that_was_resigned_before_it_was_entered_ends_at_once():
    async with TwoProcesses() as two:
        election = two.election()
        async for term in election:
            election.resign()
            async with term:
                await asyncio.sleep(3600)
            break
        assert now() == 0.0


@in_virtual_time
async def test_a_leader_that_resigns_lets_one_that_polls_lead():
    async with TwoProcesses(in_line=False) as two:
        theirs = on_clock(LockClient(FaultyBackend(two.store)), LoopClock())
        async with theirs:
            election = two.election()
            leading = asyncio.create_task(two.lead(election))
            await asyncio.sleep(1)
            waiting = asyncio.create_task(theirs.lock("scheduler").acquire())
            await asyncio.sleep(60)
            election.resign()
            lease = await waiting
            assert now() - 61 <= 1.01
            await lease.release()
            leading.cancel()


# Drains


@in_virtual_time
async def test_a_candidate_leaves_when_the_client_drains():
    async with TwoProcesses() as two, two.theirs.lock("scheduler", ttl=TTL):
        election = two.election()
        standing = asyncio.create_task(two.lead(election))
        await asyncio.sleep(3)
        assert election.standing is ElectionStanding.CANDIDATE
        assert await two.ours.drain(within=60)
        await standing
        assert (now(), two.log) == (3, [])
        assert election.standing is ElectionStanding.IDLE
        await two.lead(election)  # and no loop begins


@in_virtual_time
async def test_a_candidate_leaves_a_store_that_is_down_when_the_client_drains():
    async with TwoProcesses(in_line=False) as two:
        two.network.fail("acquire")
        standing = asyncio.create_task(two.lead(two.election(ttl=1)))
        await asyncio.sleep(60.03)
        began = now()
        await two.ours.drain(within=60)
        await standing
        assert now() == began


@in_virtual_time
async def test_a_leader_hands_over_when_its_body_has_ended():
    async with TwoProcesses() as two:

        async def leads() -> None:
            async for term in two.election():
                async with term as lease:
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await asyncio.sleep(2 * TTL)
                        two.log.append(("cleaned up", now(), lease.held))

        leading = asyncio.create_task(leads())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(two.next_leader())
        await asyncio.sleep(1)
        assert await two.ours.drain(within=60)
        await leading
        await waiting
        assert two.log == [("cleaned up", 22, True), ("next leads", 22)]


@in_virtual_time
async def test_a_leader_may_have_seconds_of_its_own():
    async with TwoProcesses() as two:
        for seconds, end in ((3600.0, 6.0), (3.0, 9.0)):
            leading = asyncio.create_task(two.lead(two.election(finish_within=5), seconds=seconds))
            await asyncio.sleep(1)
            await two.ours.drain(within=60)
            await leading
            assert now() == end
            await two.ours.aclose()
            await two.ours.__aenter__()


@in_virtual_time
async def test_at_the_bound_the_lead_of_a_body_that_goes_on_is_lost():
    async with TwoProcesses() as two:

        async def leads() -> None:
            async for term in two.election():
                async with term as lease:
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(4)
                        two.log.append(("held", lease.held))

        leading = asyncio.create_task(leads())
        await asyncio.sleep(1)
        assert not await two.ours.drain(within=2)
        await leading
        assert two.log == [("held", False)]
        assert [event.reason for event in two.events if isinstance(event, Lost)] == [LossReason.DRAINED]


@in_virtual_time
async def test_a_body_that_drains_its_own_client_ends_its_own_term():
    async with TwoProcesses() as two:
        async for term in two.election():
            async with term:
                await two.ours.drain(within=60)
                await asyncio.sleep(3600)
        assert now() == 0.0
        assert tidy()


# What can be asked


@in_virtual_time
async def test_it_tells_who_leads():
    async with TwoProcesses() as two:
        election = two.election()
        assert await election.leader() is None
        async for term in election:
            async with term as lease:
                leader = await election.leader()
                assert leader is not None
                assert leader.id == lease.holder
                assert json.loads(leader.label)["pid"] == os.getpid()
                assert await two.theirs.election("scheduler").leader() == leader
                break
        async for term in two.election(label="pod-7"):
            async with term:
                leader = await election.leader()
                assert leader is not None
                assert leader.label == "pod-7"
                break


@in_virtual_time
async def test_leading_looks_at_the_clock():
    async with TwoProcesses() as two:
        election = two.election()
        async for term in election:
            async with term:
                assert election.leading
                asyncio.get_running_loop().pass_time(TTL)
                assert not election.leading
            break


@in_virtual_time
async def test_the_standing_is_known_at_every_moment():
    async with TwoProcesses() as two:
        election = two.election()
        seen = [election.standing]
        async with two.theirs.lock("scheduler"):
            standing = asyncio.create_task(two.lead(election, seconds=2, terms=1))
            await settle()
            seen.append(election.standing)
        await asyncio.sleep(1)
        seen.append(election.standing)
        assert "leading" in repr(election)
        await standing
        seen.append(election.standing)
        assert [standing.value for standing in seen] == ["idle", "candidate", "leading", "idle"]


@in_virtual_time
async def test_a_candidate_is_one_again_when_the_store_has_answered():
    async with TwoProcesses(in_line=False) as two, two.theirs.lock("scheduler", ttl=TTL):
        election = two.election()
        standing = asyncio.create_task(two.lead(election))
        await asyncio.sleep(1)
        assert election.standing is ElectionStanding.CANDIDATE
        for _ in range(2):
            two.network.fail("acquire")
            two.network.fail("renew")
            await asyncio.sleep(TTL + 5)  # and a pause between two tries
            for _ in range(100):
                assert election.standing is ElectionStanding.UNAVAILABLE, "for as long as it lasts"
                await asyncio.sleep(0.5)
            two.network.heal()
            await asyncio.sleep(5)  # the longest pause between two tries
            assert election.standing is ElectionStanding.CANDIDATE
        standing.cancel()


@in_virtual_time
async def test_a_forked_child_has_none_of_the_roles_of_its_parent(monkeypatch):
    async with TwoProcesses() as two:
        leader, candidate = two.election(), two.election()
        leading = asyncio.create_task(two.lead(leader))
        await settle()
        waiting = asyncio.create_task(two.lead(candidate))
        await settle()
        assert [leader.standing.value, candidate.standing.value] == ["leading", "candidate"]
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", partial(int, os.getpid() + 1))
            assert [leader.standing.value, candidate.standing.value] == ["idle", "idle"]
            assert not leader.leading
        assert [leader.standing.value, candidate.standing.value] == ["leading", "candidate"]
        leading.cancel()
        waiting.cancel()


@pytest.mark.parametrize(
    "options", [{"wait": 5}, {"ttl": 0}, {"finish_within": -1}, {"finish_within": None}, {"fences": "guard"}]
)
async def test_options_that_cannot_work_are_refused_when_the_election_is_described(options):
    locks = LockClient(MemoryBackend())
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        locks.election("scheduler", **options)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        locks.elected("scheduler", **options)


async def test_an_election_needs_an_open_client():
    with pytest.raises(UsageError, match="not open"):
        await anext(aiter(LockClient(MemoryBackend()).election("scheduler")))


# The decorator
