"""Calls to the store, on virtual time: they outlive their caller, and releases are repeated until they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from contextvars import ContextVar

import pytest
from inside import LoopClock
from virtual_time import VirtualLoop, in_virtual_time, now, settle

from fencing_sdk import BackendRefusedError, BackendUnavailableError
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk.abc import Claim

TTL = 10.0
LIMIT = 2.0
GRACE = 0.05

UNAVAILABLE = BackendUnavailableError("Store", "release")
REFUSED = BackendRefusedError("Store", "release")


class ScriptedStore:
    """Releases after `delay` seconds; `script` holds what the next calls raise."""

    def __init__(self, *script: BaseException) -> None:
        self.script = list(script)
        self.delay = 0.0
        self.releases: list[float] = []

    async def give_back(self, claim, **options):
        self.releases.append(round(now(), 3))
        await asyncio.sleep(self.delay)
        if self.script:
            raise self.script.pop(0)


@contextlib.asynccontextmanager
async def office(*script: BaseException):
    store = ScriptedStore(*script)
    store_calls = StoreCalls(store, LoopClock())
    yield store_calls, store
    await store_calls.aclose(1.0)


async def hang():
    await asyncio.Event().wait()


def stubborn(until: asyncio.Event):
    """A call that swallows its cancellation."""

    async def call():
        while not until.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await until.wait()

    return call


async def answer():
    await asyncio.sleep(1.0)
    return "answer"


@in_virtual_time
async def test_a_call_without_an_answer_ends_at_its_limit_as_unavailable():
    async with office() as (store_calls, _):
        with pytest.raises(BackendUnavailableError, match="no answer within 2 s"):
            await store_calls.ask("acquire", hang(), LIMIT)
        assert LIMIT <= now() <= LIMIT + GRACE


@in_virtual_time
async def test_a_call_that_swallows_one_cancellation_is_cancelled_again():
    swallowed = []

    async def swallow_once():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.append(now())
        await asyncio.Event().wait()

    async with office() as (store_calls, _):
        call = store_calls.send("acquire", swallow_once(), LIMIT)
        with pytest.raises(BackendUnavailableError):
            await store_calls.answer("acquire", call, LIMIT)
        assert swallowed
        assert call.done()


@in_virtual_time
async def test_a_call_that_does_not_react_to_cancellation_is_left_behind():
    hears = asyncio.Event()
    async with office() as (store_calls, _):
        call = store_calls.send("acquire", stubborn(hears)(), 0.1)
        try:
            async with asyncio.timeout(5):
                with pytest.raises(BackendUnavailableError, match="no reaction"):
                    await store_calls.answer("acquire", call, 0.1)
                assert not call.done()
                began = asyncio.get_running_loop().time()
                await store_calls.aclose(0.1)
                assert asyncio.get_running_loop().time() - began < 2
        finally:
            hears.set()
            await settle()


@in_virtual_time
async def test_a_cancellation_that_leaks_out_of_a_driver_is_no_cancellation_of_ours():
    async def leak():
        raise asyncio.CancelledError

    async with office() as (store_calls, _):
        with pytest.raises(BackendUnavailableError):
            await store_calls.ask("acquire", leak(), LIMIT)


@in_virtual_time
async def test_cancelling_the_caller_does_not_abort_a_request_half_way():
    done = []

    async def call():
        await asyncio.sleep(1.0)
        done.append(now())

    async with office() as (store_calls, _):
        caller = asyncio.create_task(store_calls.ask("acquire", call(), LIMIT))
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(1.5)
        assert done == [1.0]


@in_virtual_time
async def test_a_call_sees_nothing_of_its_callers_context():
    """Or a connection pool would keep the caller's lease alive for ever."""
    variable = ContextVar("variable", default="nothing")
    variable.set("the caller's")

    async def look():
        return variable.get()

    async with office() as (store_calls, _):
        assert await store_calls.ask("acquire", look(), LIMIT) == "nothing"


@in_virtual_time
async def test_a_release_is_repeated_with_growing_pauses_until_it_is_answered():
    async with office(UNAVAILABLE, ZeroDivisionError(), UNAVAILABLE, UNAVAILABLE) as (store_calls, store):
        assert await store_calls.release(Claim("a", TTL), LIMIT)
        assert len(store.releases) == 5
        assert now() < 1


@in_virtual_time
async def test_a_release_is_given_up_when_the_ttl_has_freed_the_lock():
    async with office(*[UNAVAILABLE] * 1000) as (store_calls, store):
        assert not await store_calls.release(Claim("a", TTL), LIMIT)
        assert TTL - 1.1 <= now() <= TTL
        assert 10 < len(store.releases) < 40


@in_virtual_time
async def test_a_release_that_is_refused_is_not_repeated(caplog):
    async with office(REFUSED) as (store_calls, store):
        assert not await store_calls.release(Claim("a", TTL), LIMIT)
        assert store.releases == [0.0]
        assert "its ttl will free it" in caplog.text


async def fails_at(moment: float) -> None:
    await asyncio.sleep(moment)
    raise UNAVAILABLE


async def answers_at(moment: float) -> None:
    await asyncio.sleep(moment)


@in_virtual_time
async def test_giving_up_a_request_that_had_its_answer_releases_once():
    async with office() as (store_calls, store):
        call = store_calls.start(answers_at(0.0))
        await settle()
        await store_calls.undo(Claim("a", TTL), [call], LIMIT)
        assert store.releases == [0.0]


@in_virtual_time
async def test_giving_up_does_not_wait_for_a_request_longer_than_a_ttl():
    async with office() as (store_calls, store):
        call = store_calls.start(hang())
        await store_calls.undo(Claim("a", TTL), [call], LIMIT)
        assert store.releases[:2] == [0.0, TTL]
        assert store.releases[-1] <= 2 * TTL


@in_virtual_time
async def test_closing_cancels_at_once_what_has_no_end_of_its_own():
    async with office() as (store_calls, _):
        endless = store_calls.start_until_closing(hang())
        await settle()
        await store_calls.aclose(5.0)
        assert endless.cancelled()
        assert now() < 0.01


@in_virtual_time
async def test_closing_stops_the_repetition_of_a_release():
    async with office(*[UNAVAILABLE] * 1000) as (store_calls, store):
        returned = store_calls.release(Claim("a", 3600), LIMIT)
        await asyncio.sleep(0.001)
        await store_calls.aclose(5.0)
        assert returned.result() is False
        assert now() < 0.2
        assert len(store.releases) <= 3


@in_virtual_time
async def test_a_release_that_fails_in_a_client_that_closes_is_tried_once_more():
    """The connection may have broken under it, which its driver tells a moment later, and the next one be well."""
    async with office(UNAVAILABLE) as (errands, store):
        store.delay = 0.5
        returned = errands.release(Claim("a", 3600), LIMIT)
        await asyncio.sleep(0.1)
        await errands.aclose(5.0)
        assert returned.result() is True
        assert store.releases == [0.0, pytest.approx(0.5 + 0.1)]


@in_virtual_time
async def test_an_errand_that_fails_is_no_error_that_nobody_looked_at():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with office() as (store_calls, _):
        store_calls.start(fails_at(0.0))
        store_calls.send("acquire", fails_now(), LIMIT)
        await settle()
        gc.collect()
        assert not reported


async def fails_now() -> None:
    raise ZeroDivisionError


class Lease: ...


@in_virtual_time
async def test_no_call_and_no_timer_keeps_what_its_caller_held_alive():
    variable: ContextVar[Lease] = ContextVar("variable")

    async def ask() -> weakref.ref[Lease]:
        lease = Lease()
        variable.set(lease)
        await store_calls.wait_for(store_calls.send("acquire", hang(), LIMIT), LIMIT / 2)
        return weakref.ref(lease)

    async with office() as (store_calls, _):
        held = await asyncio.create_task(ask())
        await settle()
        gc.collect()
        assert held() is None


async def answers_now() -> None: ...


def timers() -> int:
    """Return the number of timers that the loop has to watch."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)


@in_virtual_time
async def test_every_call_ends_at_its_own_limit_although_one_timer_serves_them_all():
    async with office() as (store_calls, _):
        ended = []

        async def ask(limit: float) -> None:
            with pytest.raises(BackendUnavailableError):
                await store_calls.ask("acquire", hang(), limit)
            ended.append((limit, round(now(), 2)))

        asking = [asyncio.create_task(ask(limit)) for limit in (3.0, 0.5, 2.0, 1.0)]
        await settle()
        assert timers() == 1
        await asyncio.gather(*asking)
        assert ended == [(0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


@in_virtual_time
async def test_a_call_that_is_left_behind_is_cancelled_again_after_the_closing_too():
    hears = asyncio.Event()
    cancelled = []

    async def deaf() -> None:
        while not hears.is_set():
            try:
                await hears.wait()
            except asyncio.CancelledError:
                cancelled.append(now())

    async with office() as (store_calls, _):
        store_calls.send("acquire", deaf(), 0.1)
        await store_calls.aclose(0.5)
        closed = now()
        await asyncio.sleep(10)
        assert len([moment for moment in cancelled if moment > closed]) > 3
        hears.set()
        await settle()


@in_virtual_time
async def test_a_loop_with_a_task_factory_makes_the_tasks_of_the_errands():
    made = []

    def factory(loop, coro, **options):
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(factory)
    async with office() as (store_calls, _):
        await store_calls.ask("acquire", answer(), LIMIT)
        assert made


@in_virtual_time
async def test_whoever_asks_in_a_loop_lets_the_others_run_although_every_answer_comes_at_once():
    """Or a task that polls for a lock would keep its holder from ever releasing it."""
    async with office() as (store_calls, _):
        turned = []
        asyncio.get_running_loop().call_soon(turned.append, True)
        for _ in range(16):
            await store_calls.ask("acquire", answers_now(), LIMIT)
        assert turned


class Unyielding(asyncio.Future):
    """A future of a driver, which fails when it is to be cancelled."""

    def cancel(self, msg=None):
        raise ZeroDivisionError


@in_virtual_time
async def test_a_call_whose_cancellation_fails_leaves_the_others_their_limits():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with office() as (store_calls, _):
        unyielding = Unyielding()
        bad = store_calls.send("acquire", unyielding, 1.0)
        await settle()
        with pytest.raises(BackendUnavailableError, match="no answer within 2 s"):
            await store_calls.ask("acquire", hang(), LIMIT)
        assert LIMIT <= now() <= LIMIT + GRACE
        assert [type(error) for error in reported] == [ZeroDivisionError]
        unyielding.set_result("late")
        assert await bad == "late"


@in_virtual_time
async def test_everybody_who_waits_for_one_call_learns_that_it_is_done():
    async with office() as (store_calls, _):
        call = store_calls.send("acquire", answer(), LIMIT)
        ended = []

        async def wait() -> None:
            await store_calls.wait_for(call, LIMIT)
            ended.append(now())

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(wait())
        assert ended == [1.0] * 3


class CountedTask(asyncio.Task):
    """A task of a loop that has tasks of its own kind."""


class CountingLoop(VirtualLoop):
    def create_task(self, coro, *, name=None, context=None):
        return CountedTask(coro, loop=self, name=name, context=context)


def test_a_loop_with_tasks_of_its_own_kind_makes_the_tasks_of_the_errands():
    """A simulation could not repeat itself with tasks that its loop does not know."""

    async def ask() -> None:
        async with office() as (store_calls, _):
            call = store_calls.send("acquire", answer(), LIMIT)
            assert type(call) is CountedTask
            assert await call == "answer"

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(ask())
