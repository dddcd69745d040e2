"""
One table for both ways to the store: requests that are posted, and full calls in owned tasks.

Each scenario runs both ways on virtual time, and the same is expected of both: what the caller sees, the events, the
state of the lease, what the store holds afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import anyio
import pytest
from inside import LoopClock, memory_on, state_of
from posting import Posting
from virtual_time import block, in_virtual_time, now, settle

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    DrainingError,
    Lease,
    LossReason,
    UsageError,
)
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, Terms
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.store_calls import Posts, posts_of
from fencing_sdk._engine.timers import TimerQueue
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Busy, Claim, Grant
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Event
from fencing_sdk.testing import FaultyBackend

TTL, VALID, INTERVAL = 10.0, 7.9, 2.0
LIMIT = VALID / 2
RELEASE_LIMIT = 2.0
NAME = "a"

WAYS = pytest.mark.parametrize("posts", [True, False], ids=["posted", "in full"])


class Store(Posting, FaultyBackend):
    """A table on virtual time behind a faulty network, asked by posts or not."""

    def __init__(self, *, posts: bool) -> None:
        self.posts = posts
        self.table = memory_on(LoopClock())
        super().__init__(self.table)

    async def free(self) -> bool:
        return await self.table.inspect(NAME) is None

    def asked(self) -> list[str]:
        return [operation for operation, _ in self.calls]


class House:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.events: list[Event] = []
        self.engine = Engine(store, LoopClock(), Observers([self.events.append]), watch_stalls=False)

    async def hold(self, *, wait: float | None = None, **timing: float) -> Lease:
        terms = Terms(NAME, NAME, Timing.build(**({"ttl": TTL} | timing)), wait, DEFAULT_BACKOFF)
        return await self.engine.hold(terms, ())

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def last(self, field: str) -> object:
        return getattr(self.events[-1], field)


@contextlib.asynccontextmanager
async def house(*, posts: bool) -> AsyncIterator[House]:
    h = House(Store(posts=posts))
    await h.engine.start()
    try:
        yield h
    finally:
        h.store.heal()
        await h.engine.aclose()


def started(work) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(work)


@WAYS
@in_virtual_time
async def test_a_lease_is_acquired_and_released_by_one_request_each(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        assert lease.remaining == pytest.approx(VALID)
        await lease.release()
        assert (lease.held, lease.lost_reason) == (False, None)
        assert h.store.asked() == ["acquire", "release"]
        assert h.kinds() == ["acquiring", "acquired", "released"]
        assert h.last("confirmed")
        assert len({event.holder for event in h.events}) == 1
        assert await h.store.free()


@WAYS
@in_virtual_time
async def test_a_lease_counts_from_the_sending_of_its_request(posts):
    async with house(posts=posts) as h:
        h.store.delay("acquire", 3.0)
        asked_at = now()
        lease = await h.hold()
        assert now() == asked_at + 3.0
        assert lease.remaining == pytest.approx(VALID - 3.0)
        assert h.last("waited") == pytest.approx(3.0)
        await lease.release()


@WAYS
@in_virtual_time
async def test_a_grant_that_lands_after_its_deadline_is_released(posts):
    """The answer is late although the limit was not reached: the loop stood still. The caller gets another lease."""
    async with house(posts=posts) as h:
        h.store.delay("acquire", 1.0, times=1)
        asked = started(h.hold())
        await settle()
        block(VALID + 2.0)
        lease = await asked
        assert lease.remaining == pytest.approx(VALID, abs=0.5)
        await lease.release()
        await asyncio.sleep(1.0)
        assert await h.store.free()


@WAYS
@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0], ids=["before it is sent", "on the way", "as the answer comes"])
@in_virtual_time
async def test_whenever_an_acquisition_is_cancelled_its_grant_is_released(posts, moment):
    async with house(posts=posts) as h:
        h.store.delay("acquire", 1.0, times=1)
        caller = started(h.hold())
        if moment:
            await asyncio.sleep(moment)
        else:
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(1.5)
        assert await h.store.free()
        assert h.kinds() == ["acquiring", "not_acquired"]
        assert (str(h.last("reason")), h.last("unanswered")) == ("cancelled", 1)
        assert len(h.engine) == 0


@WAYS
@in_virtual_time
async def test_a_grant_that_lands_after_its_caller_was_cancelled_is_released(posts):
    """The first release overtakes the request: the store does not know the claim yet."""
    async with house(posts=posts) as h:
        h.store.delay("acquire", 3.0, times=1)
        caller = started(h.hold())
        await asyncio.sleep(0.1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(2.0)
        assert h.store.asked() == ["acquire", "release"]
        await asyncio.sleep(1.0)
        assert h.store.asked() == ["acquire", "release", "release"]
        assert await h.store.free()


@WAYS
@in_virtual_time
async def test_an_acquisition_without_an_answer_is_asked_again_and_then_reported(posts):
    async with house(posts=posts) as h:
        h.store.drop("acquire")
        begun = now()
        with pytest.raises(BackendUnavailableError):
            await h.hold(wait=0.5)
        assert now() - begun == pytest.approx(2.0, abs=0.2)  # one request, bounded by the patience
        assert (str(h.last("reason")), h.last("unanswered")) == ("unavailable", 1)


@WAYS
@in_virtual_time
async def test_a_request_that_is_not_answered_is_bounded_and_repeated_with_the_same_owner(posts):
    async with house(posts=posts) as h:
        h.store.drop("acquire", times=1)
        begun = now()
        lease = await h.hold()
        assert LIMIT <= now() - begun < LIMIT + 1.5
        assert h.kinds() == ["acquiring", "acquired"]
        await lease.release()
        await asyncio.sleep(1.0)
        assert await h.store.free()


@WAYS
@in_virtual_time
async def test_an_answer_that_is_lost_is_found_by_the_next_request(posts):
    async with house(posts=posts) as h:
        h.store.lose_reply("acquire", times=1)
        lease = await h.hold()
        assert lease.held
        assert h.kinds() == ["acquiring", "acquired"]
        await lease.release()
        assert await h.store.free()


@WAYS
@in_virtual_time
async def test_a_refusal_is_final_and_releases_nothing(posts):
    async with house(posts=posts) as h:
        h.store.fail("acquire", BackendRefusedError("Store", "acquire", "no"))
        with pytest.raises(BackendRefusedError):
            await h.hold()
        await asyncio.sleep(1.0)
        assert h.store.asked() == ["acquire"]
        assert (str(h.last("reason")), h.last("unanswered")) == ("refused", 0)


@WAYS
@pytest.mark.parametrize("token", [-1, 2**53, True, "34"])
@in_virtual_time
async def test_a_grant_whose_token_is_none_is_refused(posts, token, monkeypatch):
    async with house(posts=posts) as h:
        monkeypatch.setattr(h.store.table._table, "acquire", lambda _claim, _now: Grant(token))
        with pytest.raises(BackendRefusedError):
            await h.hold()


@WAYS
@in_virtual_time
async def test_a_shorter_grant_shortens_the_lease(posts, monkeypatch):
    async with house(posts=posts) as h:
        monkeypatch.setattr(h.store.table._table, "acquire", lambda _claim, _now: Grant(34, ttl=TTL / 2))
        lease = await h.hold()
        assert lease.ttl == TTL / 2
        assert lease.remaining == pytest.approx(VALID / 2)


@WAYS
@in_virtual_time
async def test_a_release_that_is_not_confirmed_is_bounded_and_goes_on_in_the_background(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        h.store.drop("release", times=1)
        begun = now()
        await lease.release()
        assert now() - begun == pytest.approx(RELEASE_LIMIT, abs=0.01)
        assert (h.kinds()[-1], h.last("confirmed")) == ("released", False)
        await asyncio.sleep(1.0)
        assert await h.store.free()
        assert h.kinds().count("released") == 1


@WAYS
@in_virtual_time
async def test_a_release_that_fails_is_tried_again(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        h.store.fail("release", times=1)
        await lease.release()
        assert h.store.asked().count("release") == 2
        assert h.last("confirmed")
        assert await h.store.free()


async def taken_away(h, lease, *, then_held=False) -> None:
    """End the grant in the store, in silence."""
    await h.store.table.release(state_of(lease).claim)
    if then_held:
        await h.store.table.acquire(Claim(lease.name, TTL))


@WAYS
@pytest.mark.parametrize("then_held", [False, True])
@in_virtual_time
async def test_a_first_release_that_finds_no_grant_is_a_loss_and_costs_no_further_request(posts, then_held):
    async with house(posts=posts) as h:
        lease = await h.hold()
        await taken_away(h, lease, then_held=then_held)
        await lease.release()
        assert lease.lost_reason is (LossReason.TAKEN_OVER if then_held else LossReason.REFUSED)
        assert h.store.asked() == ["acquire", "release"]
        assert h.kinds() == ["acquiring", "acquired", "lost", "released"]
        assert not h.last("confirmed")


@WAYS
@pytest.mark.parametrize("fault", ["fail", "lose_reply", "drop", "straggle"])
@in_virtual_time
async def test_a_repeated_release_that_finds_no_grant_is_no_loss(posts, fault):
    """The first one may have ended it."""
    async with house(posts=posts) as h:
        lease = await h.hold()
        getattr(h.store, fault)("release", *([0.1] if fault == "straggle" else []), times=1)
        if fault in {"fail", "drop"}:  # the same for the client, who cannot tell
            await taken_away(h, lease)
        await lease.release()
        await asyncio.sleep(RELEASE_LIMIT)
        assert lease.lost_reason is None
        assert h.store.asked().count("release") > 1
        assert h.kinds() == ["acquiring", "acquired", "released"]


@WAYS
@in_virtual_time
async def test_a_release_that_finds_no_grant_after_a_loss_adds_nothing(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        await taken_away(h, lease)
        state_of(lease).lose(LossReason.REVOKED, "why")
        await lease.release()
        assert lease.lost_reason is LossReason.REVOKED
        assert h.kinds() == ["acquiring", "acquired", "lost", "released"]
        assert h.last("confirmed")


@WAYS
@in_virtual_time
async def test_a_release_by_claim_of_what_was_given_up_is_no_loss(posts):
    async with house(posts=posts) as h:
        h.store.drop("acquire", times=1)
        asked = started(h.hold())
        await asyncio.sleep(0.1)
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(TTL)
        assert "release" in h.store.asked()
        assert h.kinds() == ["acquiring", "not_acquired"]


@WAYS
@pytest.mark.parametrize("how", ["task", "scope"])
@in_virtual_time
async def test_a_release_outlasts_the_cancellation_of_its_caller(posts, how):
    async with house(posts=posts) as h:
        lease = await h.hold()
        h.store.delay("release", 1.0)
        begun = now()

        async def leave() -> None:
            with anyio.CancelScope() as scope:
                if how == "scope":
                    asyncio.get_running_loop().call_later(0.5, scope.cancel)
                await lease.release()

        caller = started(leave())
        if how == "task":
            await asyncio.sleep(0.5)
            caller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller
        assert caller.cancelled() == (how == "task")
        assert now() - begun == pytest.approx(1.0)
        assert h.store.asked().count("release") == 1
        assert (h.kinds()[-1], h.last("confirmed")) == ("released", True)
        assert await h.store.free()


@WAYS
@in_virtual_time
async def test_a_release_in_a_coroutine_that_is_closed_goes_on(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        h.store.delay("release", 1.0)
        release = lease.release()
        release.send(None)
        release.close()
        await asyncio.sleep(1.5)
        assert await h.store.free()
        assert h.kinds()[-1] == "released"


@WAYS
@in_virtual_time
async def test_a_client_that_closes_meanwhile_gives_the_grant_back(posts):
    async with house(posts=posts) as h:
        h.store.delay("acquire", 1.0)
        caller = started(h.hold())
        await asyncio.sleep(0.5)
        closing = started(h.engine.aclose())
        with pytest.raises(UsageError):
            await caller
        await closing
        assert await h.store.free()
        assert (str(h.last("reason")), h.kinds()) == ("closed", ["acquiring", "not_acquired"])


@WAYS
@in_virtual_time
async def test_a_client_that_closes_waits_for_a_release_under_way(posts):
    async with house(posts=posts) as h:
        lease = await h.hold()
        h.store.delay("release", 1.0)
        leaving = started(lease.release())
        await asyncio.sleep(0.5)
        await h.engine.aclose()
        assert leaving.done()
        assert await h.store.free()
        assert (h.kinds()[-1], h.last("confirmed")) == ("released", True)


@WAYS
@in_virtual_time
async def test_a_drain_interrupts_an_acquisition_that_waits_for_its_answer(posts):
    async with house(posts=posts) as h:
        h.store.delay("acquire", 1.0)
        caller = started(h.hold())
        await asyncio.sleep(0.5)
        begun = now()
        draining = started(h.engine.drain(60.0))
        with pytest.raises(DrainingError):
            await caller
        assert now() == begun
        await draining
        await asyncio.sleep(1.0)
        assert await h.store.free()
        assert (str(h.last("reason")), h.kinds()) == ("draining", ["acquiring", "not_acquired"])


@WAYS
@in_virtual_time
async def test_nothing_is_left_behind(posts):
    """No task, no future with an exception that was not retrieved, no entry in a table."""
    async with house(posts=posts) as h:
        heard = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        for fault in (h.store.fail, h.store.lose_reply):
            fault("acquire", times=1)
            fault("release", times=1)
            await (await h.hold()).release()
        await asyncio.sleep(2 * TTL)
        gc.collect()
        assert heard == []
        assert not list(h.engine._store_calls._timers)
        assert not h.engine._store_calls._tasks
        assert len(h.engine) == 0
        assert await h.store.free()


# What the posts alone promise.


@in_virtual_time
async def test_posts_are_used_where_a_backend_has_them():
    async with house(posts=True) as h:
        posts = h.engine._store_calls.posts
        assert posts is not None
        sent = []
        posts.acquire, posts.release = _counted(sent, posts.acquire), _counted(sent, posts.release)
        await (await h.hold()).release()
        assert len(sent) == 2


def _counted(sent, post):
    def counted(*args):
        sent.append(post)
        return post(*args)

    return counted


def test_a_subclass_that_changes_a_call_alone_is_asked_by_the_call():
    class Slow(MemoryBackend):
        async def acquire(self, claim):
            return Busy()

    class SlowAtLeaving(MemoryBackend):
        async def release(self, claim):
            return None

    class Patched(MemoryBackend):
        pass

    patched = Patched()
    patched.acquire = Slow().acquire
    assert posts_of(MemoryBackend()) is not None
    assert posts_of(Patched()) is not None
    assert [posts_of(backend) for backend in (Slow(), SlowAtLeaving(), patched, FaultyBackend(MemoryBackend()))] == [
        None
    ] * 4


class Manual:
    """Posts that a test answers by hand."""

    def __init__(self) -> None:
        self.answers = []
        self.given_up = 0

    def post_acquire(self, _claim, answer):
        self.answers.append(answer)
        return self

    post_release = post_acquire

    def give_up(self):
        self.given_up += 1


@in_virtual_time
async def test_the_first_answer_counts_and_a_second_one_harms_nothing():
    manual, timers = Manual(), _timers()
    flight = Posts(manual, timers).acquire(Claim(NAME, TTL), now(), LIMIT)
    manual.answers[0](Grant(34))
    assert not list(timers), "an answer drops the limit"
    call = flight.call()
    manual.answers[0](Busy())
    await flight.waiter
    assert flight.outcome == Grant(34) == call.result()


@in_virtual_time
async def test_at_the_limit_the_request_is_given_up_and_its_answer_still_lands():
    manual, timers = Manual(), _timers()
    flight = Posts(manual, timers).acquire(Claim(NAME, TTL), now(), LIMIT)
    begun = now()
    await flight.waiter
    assert now() - begun == pytest.approx(LIMIT)
    assert (flight.outcome, flight.overdue, manual.given_up) == (None, True, 1)
    call = flight.call()
    manual.answers[0](Grant(34))
    assert call.result() == Grant(34)
    assert not list(timers)


@in_virtual_time
async def test_a_request_that_is_over_before_its_limit_leaves_no_timer_behind():
    """The closing of a client ends what is under way."""
    manual, timers = Manual(), _timers()
    Posts(manual, timers).acquire(Claim(NAME, TTL), now(), LIMIT).over()
    assert (manual.given_up, list(timers)) == (1, [])


@in_virtual_time
async def test_an_abandoned_request_keeps_its_limit_until_it_is_answered():
    """So that a connection on which nothing comes is closed, and not left to all others."""
    manual, timers = Manual(), _timers()
    posts = Posts(manual, timers)
    for _ in range(2):
        posts.acquire(Claim(NAME, TTL), now(), LIMIT)
    manual.answers[1](Busy())
    await asyncio.sleep(LIMIT + 0.1)
    assert manual.given_up == 1
    assert not list(timers)


@in_virtual_time
async def test_a_task_that_asks_in_a_loop_lets_others_run():
    store = memory_on(LoopClock())
    engine = Engine(store, LoopClock(), Observers(()), watch_stalls=False)
    await engine.start()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = started(other())
    terms = Terms(NAME, NAME, Timing.build(ttl=TTL), 0.0, DEFAULT_BACKOFF)
    for _ in range(64):
        await (await engine.hold(terms, ())).release()
    assert turns >= 8
    beside.cancel()
    await engine.aclose()


@in_virtual_time
async def test_what_was_not_executed_is_asked_in_full_at_once():
    class Unready(Store):
        def post_acquire(self, claim, answer):
            answer(PostOutcome.NOT_EXECUTED)

        post_release = post_acquire

    h = House(Unready(posts=True))
    await h.engine.start()
    begun = now()
    await (await h.hold()).release()
    assert (now(), h.store.asked()) == (begun, ["acquire", "release"])
    assert h.kinds() == ["acquiring", "acquired", "released"]
    await h.engine.aclose()


def _timers() -> TimerQueue:
    return TimerQueue(asyncio.get_running_loop())
