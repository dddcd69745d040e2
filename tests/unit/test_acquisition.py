"""An acquisition, on virtual time: patience, back-off, lines, and what is done about attempts without an answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator

import pytest
import tenacity
from inside import LoopClock
from virtual_time import block, in_virtual_time, now, settle

from fencing_sdk import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    LockHeldError,
    UsageError,
)
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, AcquireResult, Acquisition, BackendOpening, Terms
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import LOCK, READER, Busy, Claim, Grant, Permit, PlaceInLine, WaiterNotice
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces
from fencing_sdk.events import Event, NotAcquired

TTL, VALID = 10.0, 7.9
UNAVAILABLE = BackendUnavailableError("Store", "acquire")


class ScriptedStore:
    """Answers attempts by a script, one entry each; the last entry stays. A number before an entry delays it."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.asked: list[tuple[float, str]] = []
        self.released: list[tuple[float, str]] = []

    async def acquire(self, claim: Claim) -> Grant | Busy:
        self.asked.append((round(now(), 6), claim.owner))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, tuple):
            delay, answer = answer
            await asyncio.sleep(delay)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def release(self, claim: Claim) -> None:
        self.released.append((round(now(), 6), claim.owner))

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.asked]

    @property
    def owners(self) -> list[str]:
        return [owner for _, owner in self.asked]


class StoreWithLine(ScriptedStore):
    """Also lets waiters stand in line."""

    def __init__(self, *script) -> None:
        super().__init__(*script)
        self.standing: list[str] = []
        self.turn = asyncio.Event()
        self.faults: list[Exception] = []
        self.joins = 0
        self.leaving = 0.0
        self.places = KeptPlaces()

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:
        assert hand_over
        return self.places.stand(self.in_line, claim, notify)

    @contextlib.asynccontextmanager
    async def in_line(self, claim: Claim) -> AsyncIterator[StoreWithLine]:
        self.joins += 1
        await asyncio.sleep(0.01)
        if self.faults:
            raise self.faults.pop(0)
        self.standing.append(claim.owner)
        try:
            yield self
        finally:
            await asyncio.sleep(self.leaving)
            self.standing.remove(claim.owner)

    async def wait(self) -> None:
        await self.turn.wait()
        self.turn.clear()
        if self.faults:
            raise self.faults.pop(0)


class Desk:
    """One acquisition, and what it is made of."""

    def __init__(self, store: ScriptedStore, *, wait=None, backoff=DEFAULT_BACKOFF, **timing) -> None:
        self.store = store
        self.events: list[Event] = []
        self.store_calls = StoreCalls(store, LoopClock())
        self.opening = BackendOpening(store, LoopClock(), self.store_calls)
        self.terms = Terms("a", "a", Timing.build(**({"ttl": TTL} | timing)), wait, backoff)

    async def run(self) -> AcquireResult:
        observers = Observers([self.events.append])
        return await Acquisition(self.store, LoopClock(), self.store_calls, self.opening, observers, self.terms).run()

    @property
    def abandoned(self) -> int:
        return sum(isinstance(event, NotAcquired) and event.unanswered > 0 for event in self.events)


@contextlib.asynccontextmanager
async def desk(store: ScriptedStore, **options) -> AsyncIterator[Desk]:
    desk = Desk(store, **options)
    yield desk
    await desk.store_calls.aclose(1.0)


def every(seconds: float):
    """A back-off without growth and jitter."""
    return tenacity.wait_fixed(seconds)


@in_virtual_time
async def test_a_grant_that_only_repeats_an_earlier_one_counts_from_the_first_request():
    async with desk(ScriptedStore(UNAVAILABLE, UNAVAILABLE, Grant(34, restarted=False)), backoff=every(1)) as d:
        won = await d.run()
        assert now() == 2.0
        assert won.sent_at == 1000.0


@in_virtual_time
async def test_a_repeated_grant_whose_first_request_is_too_old_is_not_used():
    repeated = Grant(34, restarted=False)
    async with desk(ScriptedStore(UNAVAILABLE, repeated, repeated, Grant(35)), backoff=every(VALID + 0.1)) as d:
        won = await d.run()
        assert won.grant.token in {34, 35}
        assert d.store.owners[0] == d.store.owners[1] != won.claim.owner
        assert d.store.released[0] == (round(VALID + 0.1, 6), d.store.owners[0])


@in_virtual_time
async def test_a_grant_too_short_for_the_heartbeat_that_was_set_is_refused_and_released():
    async with desk(ScriptedStore(Grant(34, ttl=3.0)), heartbeat_interval=1.0) as d:
        with pytest.raises(BackendRefusedError, match=r"it grants less: heartbeat_interval=1 was set for ttl=10"):
            await d.run()
        await settle()
        assert len(d.store.released) == 1


@in_virtual_time
async def test_patience_ends_when_it_is_over_and_not_before():
    async with desk(ScriptedStore(Busy(3600.0)), wait=5.0, backoff=every(3.0)) as d:
        with pytest.raises(AcquireTimeoutError) as over:
            await d.run()
        assert over.value.waited == now() == 5.0
        assert d.store.times == [0.0, 3.0, 5.0], "asked for the last time when the patience ends"
        assert d.abandoned == 0


@in_virtual_time
async def test_asked_once_it_does_not_ask_a_silent_store_twice():
    async with desk(ScriptedStore(UNAVAILABLE), wait=0.0) as d:
        with pytest.raises(BackendUnavailableError):
            await d.run()
        assert len(d.store.asked) == 1
        assert d.abandoned == 1


@in_virtual_time
async def test_a_silent_store_is_asked_for_one_ttl_however_long_the_patience():
    async with desk(ScriptedStore(UNAVAILABLE)) as d:
        with pytest.raises(BackendUnavailableError):
            await d.run()
        assert TTL <= now() <= TTL + 1.1
        assert len(set(d.store.owners)) == 1
        assert d.abandoned == 1


@in_virtual_time
async def test_an_attempt_does_not_outlast_the_patience_by_more_than_two_seconds():
    async with desk(ScriptedStore((3600, Grant(34))), wait=0.2) as d:
        with pytest.raises(BackendUnavailableError):
            await d.run()
        assert now() < 2.3


@in_virtual_time
async def test_the_users_wait_strategy_sees_what_a_tenacity_strategy_sees():
    seen = []

    def strategy(state: tenacity.RetryCallState) -> float:
        seen.append((state.attempt_number, round(state.idle_for, 6), type(state.outcome.exception())))
        return 0.5

    async with desk(ScriptedStore(UNAVAILABLE, Busy(60.0), Grant(34)), backoff=strategy) as d:
        await d.run()
        assert seen == [(1, 0.0, BackendUnavailableError), (2, 0.5, LockHeldError)]
        assert d.store.times == [0.0, 0.5, 1.0]


@in_virtual_time
async def test_the_default_back_off_grows_has_jitter_and_stays_below_a_second():
    async with desk(ScriptedStore(Busy(None)), wait=60.0) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        pauses = [later - earlier for earlier, later in itertools.pairwise(d.store.times)]
        assert max(pauses) <= 1.0
        assert sum(pauses[:3]) < 0.4
        assert len({round(pause, 4) for pause in pauses}) > len(pauses) / 2
        assert 60 < len(pauses) < 240


@pytest.mark.parametrize("advice", [0.0, -5.0, 1e-9], ids=repr)
@in_virtual_time
async def test_advice_that_lies_in_the_past_does_not_make_a_waiter_spin(advice):
    async with desk(ScriptedStore(Busy(advice)), wait=1.0, backoff=every(60)) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        assert len(d.store.asked) <= 1100


@pytest.mark.parametrize("advice", [math.nan, math.inf, -math.inf], ids=repr)
@in_virtual_time
async def test_advice_that_is_no_number_is_no_advice(advice):
    async with desk(ScriptedStore(Busy(advice), Grant(34)), backoff=every(3)) as d:
        await d.run()
        assert now() == 3.0


@in_virtual_time
async def test_who_stands_in_line_is_woken_by_the_store():
    async with desk(StoreWithLine(Busy(3600.0), Busy(3600.0), Grant(34)), backoff=every(60)) as d:
        task = asyncio.create_task(d.run())
        await asyncio.sleep(2.0)
        assert d.store.times == [0.0, 0.01], "once, and once more when a release can no longer be missed"
        assert d.store.standing == d.store.owners[:1]
        d.store.turn.set()
        await task
        assert now() == 2.0
        await settle()
        assert d.store.standing == []


@in_virtual_time
async def test_who_stands_in_line_asks_by_itself_too_lest_a_message_was_lost():
    async with desk(StoreWithLine(Busy(3600.0)), wait=21.0, backoff=every(60)) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        pauses = [later - earlier for earlier, later in itertools.pairwise(d.store.times[1:])]
        assert len(pauses) >= 4
        assert all(3.7 <= pause <= 5.0 for pause in pauses[:-1])
        await settle()
        assert d.store.standing == []


@in_virtual_time
async def test_who_stands_in_line_asks_when_the_holders_time_is_over():
    async with desk(StoreWithLine(Busy(2.0), Busy(1.5), Grant(34)), backoff=every(60)) as d:
        await d.run()
        assert d.store.times == [0.0, 0.01, 1.51]


@pytest.mark.parametrize("fault", [UNAVAILABLE, BackendRefusedError("Store", "queue"), ZeroDivisionError()], ids=repr)
@in_virtual_time
async def test_a_line_that_cannot_be_joined_leaves_polling(fault):
    store = StoreWithLine(Busy(3600.0))
    store.faults = [fault] * 100
    async with desk(store, wait=10.0, backoff=every(1.0)) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        assert len(d.store.asked) >= 10


@in_virtual_time
async def test_a_line_that_breaks_is_joined_again():
    store = StoreWithLine(*[Busy(3600.0)] * 3, Grant(34))
    async with desk(store, backoff=every(60)) as d:
        task = asyncio.create_task(d.run())
        await asyncio.sleep(1.0)
        store.faults = [UNAVAILABLE]
        store.turn.set()
        await asyncio.sleep(1.5)
        assert store.joins == 2
        assert store.standing == store.owners[:1]
        store.turn.set()
        await task
        assert now() == 2.5


@in_virtual_time
async def test_a_drivers_own_error_leaves_and_what_it_may_have_done_is_released():
    async with desk(ScriptedStore(ZeroDivisionError())) as d:
        with pytest.raises(ZeroDivisionError):
            await d.run()
        await settle()
        assert len(d.store.released) == 1


@pytest.mark.parametrize(
    ("mode", "answer", "mistake"),
    [
        (LOCK, Grant(True), "a token must be an int"),
        (LOCK, Grant("34"), "a token must be an int"),
        (LOCK, Grant(2**53), "a token must be an int"),
        (LOCK, Grant(34, ttl="9"), "the ttl of a grant must be a number"),
        (LOCK, Grant(34, ttl=math.nan), "the ttl of a grant must be a number"),
        (Permit(2), Grant(34), "the number of a permit must be an int from 0 to below 2"),
        (Permit(2), Grant(34, permit=2), "the number of a permit must be an int from 0 to below 2"),
        (Permit(2), Grant(34, permit=True), "the number of a permit must be an int from 0 to below 2"),
        (LOCK, Grant(34, permit=0), "the grant of a lock has no number of a permit"),
        (READER, Grant(34, permit=0), "the grant of a reader has no number of a permit"),
        (LOCK, Grant(34, restarted="no"), "restarted must be True or False"),
        (LOCK, Grant(34, restarted=None), "restarted must be True or False"),
        (LOCK, Busy("soon"), "retry_after must be a number of seconds, or None"),
        (LOCK, Busy(retry_after=[1]), "retry_after must be a number of seconds, or None"),
        (LOCK, Busy(True), "retry_after must be a number of seconds, or None"),
        (LOCK, None, "its answer must be a Grant or Busy, not NoneType"),
        (LOCK, 34, "its answer must be a Grant or Busy, not int"),
    ],
)
@in_virtual_time
async def test_an_answer_that_a_backend_has_filled_in_wrongly_is_refused_and_released(mode, answer, mistake):
    async with desk(ScriptedStore(answer)) as d:
        d.terms = d.terms._replace(mode=mode, wait=1.0)
        with pytest.raises(BackendRefusedError, match=mistake):
            await d.run()
        await settle()
        assert len(d.store.released) == 1


@pytest.mark.parametrize("kind", [ScriptedStore, StoreWithLine])
@in_virtual_time
async def test_a_waiter_does_not_hold_up_the_closing_of_its_client(kind):
    async with desk(kind(Busy(3600.0)), backoff=every(60)) as d:
        task = asyncio.create_task(d.run())
        await asyncio.sleep(1)
        await d.store_calls.aclose(5.0)
        with pytest.raises(UsageError, match="closed while it waited"):
            await task
        assert now() < 1.1


@in_virtual_time
async def test_the_closing_of_a_client_waits_until_its_places_in_line_are_left():
    async with desk(StoreWithLine(Busy(3600.0)), backoff=every(60)) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1)
        d.store.leaving = 1.5
        await d.store_calls.aclose(5.0)
        assert d.store.standing == []
        with pytest.raises(UsageError, match="closed"):
            await acquiring
        assert now() == pytest.approx(2.5)


@pytest.mark.parametrize(("limit", "ends"), [(1.0, 1.0), (5.0, 2.0)])
@in_virtual_time
async def test_the_closing_of_a_client_waits_for_a_bounded_time_until_its_places_in_line_are_left(limit, ends):
    async with desk(StoreWithLine(Busy(3600.0)), backoff=every(60)) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1)
        d.store.leaving = 3600.0
        began = now()
        await d.store_calls.aclose(limit)
        assert now() - began == pytest.approx(ends, abs=0.1)
        with pytest.raises(UsageError, match="closed"):
            await acquiring


@in_virtual_time
async def test_a_chosen_back_off_counts_where_the_store_wakes_no_waiter():
    """In any other line its pauses are those of a try that could not reach the store."""
    async with desk(StoreThatPolls(Busy(5.0)), wait=12.0, backoff=every(3)) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        assert d.store.times == [0.0, 3.0, 6.0, 9.0, 12.0]
    async with desk(StoreThatPolls(Busy(5.0)), wait=2.0) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        assert len(d.store.times) == 5  # as the line has it


# A line that hands the lock over.


class StoreThatHandsOver(ScriptedStore, PlaceInLine):
    """Tells its one waiter what the test wants it to be told."""

    def __init__(self, *script) -> None:
        super().__init__(*script)
        self.notify: WaiterNotice | None = None
        self.left = 0

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> StoreThatHandsOver:
        assert claim.owner == self.owners[-1]
        self.notify, self.hands_over = notify, hand_over
        return self

    def retry_after(self, _advice: float) -> float:
        return 60.0

    def leave(self) -> None:
        self.left += 1


class StoreThatPolls(StoreThatHandsOver):
    """Wakes no waiter."""

    polls = True

    def retry_after(self, _advice: float) -> float:
        return 0.5


@in_virtual_time
async def test_a_grant_that_is_handed_over_counts_from_its_age_and_is_not_asked_for():
    async with desk(StoreThatHandsOver(Busy(5.0))) as d:
        acquiring = asyncio.ensure_future(d.run())
        await asyncio.sleep(30)
        d.store.notify(Grant(34), 0.75)
        won = await acquiring
        assert (won.grant.token, won.sent_at, won.unanswered_calls) == (34, 1030 - 0.75, ())
        assert (d.store.times, d.store.left) == ([0.0], 1)
        await settle()
        assert d.store.released == []


@in_virtual_time
async def test_a_grant_that_is_handed_over_late_is_asked_for_again_by_the_same_owner():
    """Its first renewal is due: the request restarts the ttl, and counts from its own sending."""
    async with desk(StoreThatHandsOver(Busy(5.0), (0.5, Grant(34)))) as d:
        acquiring = asyncio.ensure_future(d.run())
        await asyncio.sleep(30)
        d.store.notify(Grant(34), Timing.build(ttl=TTL).heartbeat_interval)
        won = await acquiring
        assert (won.sent_at, d.store.times) == (1030.0, [0.0, 30.0])
        assert len(set(d.store.owners)) == 1
        await settle()
        assert d.store.released == []


@in_virtual_time
async def test_a_grant_that_was_handed_over_before_a_pause_of_the_process_is_asked_for_again():
    async with desk(StoreThatHandsOver(Busy(5.0), Grant(34))) as d:
        acquiring = asyncio.ensure_future(d.run())
        await asyncio.sleep(30)
        d.store.notify(Grant(34), 0.1)
        block(VALID)
        won = await acquiring
        assert won.sent_at == 1030 + VALID


@in_virtual_time
async def test_a_waiter_that_gives_up_in_the_turn_of_its_grant_releases_its_claim():
    async with desk(StoreThatHandsOver(Busy(5.0))) as d:
        acquiring = asyncio.ensure_future(d.run())
        await asyncio.sleep(30)
        d.store.notify(Grant(34), 0.1)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await settle()
        assert (d.store.released, d.store.left) == ([(30.0, d.store.owners[0])], 1)


@in_virtual_time
async def test_a_waiter_whose_patience_ends_releases_its_claim_because_a_grant_may_be_on_its_way():
    async with desk(StoreThatHandsOver(Busy(5.0)), wait=12.0) as d:
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        await settle()
        assert (d.store.released, d.store.left) == ([(12.0, d.store.owners[0])], 1)
        assert d.abandoned == 0


@in_virtual_time
async def test_a_grant_is_taken_although_a_try_that_came_before_had_no_answer():
    async with desk(StoreThatHandsOver(Busy(5.0), UNAVAILABLE), backoff=every(3)) as d:
        acquiring = asyncio.ensure_future(d.run())
        await asyncio.sleep(30)
        d.store.notify()
        await asyncio.sleep(1)
        d.store.notify(Grant(34), 0.5)
        won = await acquiring
        assert (won.sent_at, len(won.unanswered_calls), d.store.times) == (1030.5, 1, [0.0, 30.0])


@in_virtual_time
async def test_a_waiter_that_is_woken_only_and_gives_up_sends_no_release():
    """It was handed nothing, for certain; and the place leaves the line."""
    async with desk(StoreThatHandsOver(Busy(5.0)), wait=12.0) as d:
        d.terms = d.terms._replace(mode=READER)
        with pytest.raises(AcquireTimeoutError):
            await d.run()
        await settle()
        assert (d.store.released, d.store.left) == ([], 1)


class OneByOne(ScriptedStore):
    """Has one connection: it carries out one call after the other, each in 20 ms."""

    def __init__(self, answer) -> None:
        super().__init__(answer)
        self.door = asyncio.Lock()
        self.began: dict[str, float] = {}

    async def acquire(self, claim: Claim) -> Grant | Busy:
        self.began[claim.owner] = LoopClock().now()
        async with self.door:
            await asyncio.sleep(0.02)
            return await super().acquire(claim)


class Silent(ScriptedStore):
    """Answers no call."""

    def __init__(self) -> None:
        super().__init__((math.inf, None))

    async def release(self, claim: Claim) -> None:
        await asyncio.sleep(math.inf)


class Crowd:
    """Many acquisitions of one client."""

    def __init__(self, store: ScriptedStore, count: int, *, wait=None) -> None:
        self.desk = Desk(store, wait=wait)
        self.ends: list[float] = []
        self.tasks = [asyncio.ensure_future(self._run()) for _ in range(count)]

    async def _run(self) -> AcquireResult:
        try:
            return await self.desk.run()
        finally:
            self.ends.append(now())

    async def outcomes(self) -> list[AcquireResult | BaseException]:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


@in_virtual_time
async def test_what_a_client_cannot_send_yet_waits_and_counts_from_when_it_is_sent():
    store = OneByOne(Grant(1))
    results = await Crowd(store, 2000).outcomes()  # 40 s, where a call may take 4
    assert all(isinstance(result, AcquireResult) for result in results)
    assert [result.claim.owner for result in results] == store.owners  # in the order in which they asked
    assert all(result.sent_at == store.began[result.claim.owner] for result in results)


@in_virtual_time
async def test_in_a_crowd_a_release_is_not_behind_the_tries_that_wait():
    store = OneByOne(Grant(1))
    crowd = Crowd(store, 500)
    await asyncio.sleep(1.0)
    assert await crowd.desk.store_calls.release(Claim("a", TTL), VALID / 2)
    assert store.released[0][0] == 1.0
    assert len(store.began) < 200
    await crowd.outcomes()


@in_virtual_time
async def test_the_patience_of_those_that_wait_for_their_turn_ends_as_a_wait():
    results = await Crowd(OneByOne(Grant(1)), 500, wait=3.0).outcomes()
    errors = [error for error in results if not isinstance(error, AcquireResult)]
    assert {type(error) for error in errors} == {AcquireTimeoutError}
    assert all(error.waited == pytest.approx(3.0) for error in errors)
    assert 150 <= len(results) - len(errors) < 200  # those sent before may answer a little later


@in_virtual_time
async def test_who_asks_once_asks_whenever_its_turn_comes():
    results = await Crowd(OneByOne(Busy(None)), 500, wait=0.0).outcomes()
    assert {type(error) for error in results} == {LockHeldError}


@in_virtual_time
async def test_a_store_that_answers_no_call_is_an_outage_for_those_that_wait_for_their_turn_too():
    crowd = Crowd(Silent(), 300)
    assert {type(error) for error in await crowd.outcomes()} == {BackendUnavailableError}
    assert max(crowd.ends) < 2 * TTL


@in_virtual_time
async def test_turns_of_those_that_give_up_go_to_the_others():
    store = OneByOne(Grant(1))
    crowd = Crowd(store, 300)
    await asyncio.sleep(0.1)
    for task in crowd.tasks[::2]:
        task.cancel()
    results = await crowd.outcomes()
    assert sum(isinstance(result, AcquireResult) for result in results) == 150 + sum(
        isinstance(result, AcquireResult) for result in results[::2]
    )
    assert all(task.cancelled() or task.result() for task in crowd.tasks)


@in_virtual_time
async def test_a_client_that_closes_sends_away_those_that_wait_for_their_turn():
    crowd = Crowd(OneByOne(Grant(1)), 300)
    await asyncio.sleep(0.1)
    await crowd.desk.store_calls.aclose(10.0)
    results = await crowd.outcomes()
    assert {type(error) for error in results if not isinstance(error, AcquireResult)} == {UsageError}
    assert max(crowd.ends) < 3.0
