"""An acquisition, on virtual time: patience, back-off, lines, and what is done about requests without an answer."""

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
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, Acquisition, BackendOpening, HeldTicket, Terms
from fencing_sdk._engine.heartbeat import Heartbeat
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import LOCK, READER, WAITER_TTL, Bell, Busy, Claim, Gone, Permit, Place
from fencing_sdk.events import Event, NotAcquired

TTL, VALID = 10.0, 7.9
WAITER_VALID = WAITER_TTL * 0.99 - WAITER_TTL / 5
UNAVAILABLE = BackendUnavailableError("Store", "acquire")
WAITS = Place(None, None, 3)
HOLDS = Place(34, None, 3)
GRANT = Place(34)


class ScriptedStore:
    """Answers draws by a script, one entry each; the last entry stays. A number before an entry delays it."""

    rings = False

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.asked: list[tuple[float, str]] = []
        self.released: list[tuple[float, str]] = []

    async def draw(self, claim, **options):
        self.asked.append((round(now(), 6), claim.owner))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, tuple) and not isinstance(answer, Place | Busy):
            delay, answer = answer
            await asyncio.sleep(delay)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def give_back(self, claim, **options):
        self.released.append((round(now(), 6), claim.owner))

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.asked]

    @property
    def owners(self) -> list[str]:
        return [owner for _, owner in self.asked]


class StoreWithLine(ScriptedStore):
    """Has a line and rings. Each keep has the next answer of `keeps`, of which the last one stays."""

    rings = True

    def __init__(self, *script, keeps=(WAITS,)) -> None:
        super().__init__(*script)
        self.keeps = list(keeps)
        self.kept: list[float] = []
        self.numbers: list[int] = []
        self.bells: dict[str, Bell] = {}

    def listen(self, claim, bell):
        assert claim.owner not in self.bells
        self.bells[claim.owner] = bell
        return lambda: self.bells.pop(claim.owner)

    def ring(self, news) -> None:
        self.bells[self.owners[-1]](news)

    async def keep(self, tickets):
        assert len(tickets) == 1
        self.kept.append(round(now(), 6))
        self.numbers.append(tickets[0][1])
        answer = self.keeps.pop(0) if len(self.keeps) > 1 else self.keeps[0]
        if isinstance(answer, tuple) and not isinstance(answer, Place | Gone):
            delay, answer = answer
            await asyncio.sleep(delay)
        if isinstance(answer, BaseException):
            raise answer
        return [answer]


class Desk:
    """One acquisition, and what it is made of."""

    def __init__(self, store: ScriptedStore, *, wait=None, backoff=DEFAULT_BACKOFF, **timing) -> None:
        self.store = store
        self.events: list[Event] = []
        self.observers = Observers([self.events.append])
        self.store_calls = StoreCalls(store, LoopClock())
        self.opening = BackendOpening(store, LoopClock(), self.store_calls)
        self.heartbeat = Heartbeat(store, LoopClock(), self.store_calls, self.observers, watch_stalls=False)
        self.beating = asyncio.create_task(self.heartbeat.run())
        self.terms = Terms("a", "a", Timing.build(**({"ttl": TTL} | timing)), wait, backoff)

    async def run(self) -> HeldTicket:
        parts = self.store, LoopClock(), self.store_calls, self.opening, self.heartbeat, self.observers
        acquisition = Acquisition(*parts, self.terms)
        return acquisition.begin() or await acquisition.run()

    @property
    def abandoned(self) -> int:
        return sum(isinstance(event, NotAcquired) and event.unanswered > 0 for event in self.events)


@contextlib.asynccontextmanager
async def desk(store: ScriptedStore, **options) -> AsyncIterator[Desk]:
    desk = Desk(store, **options)
    yield desk
    desk.beating.cancel()
    await desk.store_calls.aclose(1.0)


def every(seconds: float):
    """A back-off without growth and jitter."""
    return tenacity.wait_fixed(seconds)


@in_virtual_time
async def test_a_grant_too_short_for_the_heartbeat_that_was_set_is_refused_and_released():
    async with desk(ScriptedStore(Place(34, ttl=3.0)), heartbeat_interval=1.0) as d:
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
    async with desk(ScriptedStore((3600, GRANT)), wait=0.2) as d:
        with pytest.raises(BackendUnavailableError):
            await d.run()
        assert now() < 2.3


@in_virtual_time
async def test_the_users_wait_strategy_sees_what_a_tenacity_strategy_sees():
    seen = []

    def strategy(state: tenacity.RetryCallState) -> float:
        seen.append((state.attempt_number, round(state.idle_for, 6), type(state.outcome.exception())))
        return 0.5

    async with desk(ScriptedStore(UNAVAILABLE, Busy(60.0), GRANT), backoff=strategy) as d:
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
    async with desk(ScriptedStore(Busy(advice), GRANT), backoff=every(3)) as d:
        await d.run()
        assert now() == 3.0


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
        (LOCK, Place(True), "a token must be an int"),
        (LOCK, Place("34"), "a token must be an int"),
        (LOCK, Place(2**53), "a token must be an int"),
        (LOCK, Place(34, ttl="9"), "the ttl of a place must be a number"),
        (LOCK, Place(34, ttl=math.nan), "the ttl of a place must be a number"),
        (Permit(2), Place(34), "the number of a permit must be an int from 0 to below 2"),
        (Permit(2), Place(34, permit=2), "the number of a permit must be an int from 0 to below 2"),
        (Permit(2), Place(34, permit=True), "the number of a permit must be an int from 0 to below 2"),
        (LOCK, Place(34, permit=0), "the place of a lock has no number of a permit"),
        (READER, Place(34, permit=0), "the place of a reader has no number of a permit"),
        (LOCK, None, "its answer must be a Place or Busy, not NoneType"),
        (LOCK, 34, "its answer must be a Place or Busy, not int"),
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


@pytest.mark.parametrize("store", [ScriptedStore(Busy(3600.0)), StoreWithLine(WAITS)], ids=["polls", "in line"])
@in_virtual_time
async def test_a_waiter_does_not_hold_up_the_closing_of_its_client(store):
    async with desk(store, backoff=every(60)) as d:
        task = asyncio.create_task(d.run())
        await asyncio.sleep(1)
        await d.store_calls.aclose(5.0)
        with pytest.raises(UsageError, match="closed while it waited"):
            await task
        assert now() < 1.1


# A line.


@in_virtual_time
async def test_a_bell_about_the_ticket_of_the_latest_answer_is_the_grant():
    async with desk(StoreWithLine(WAITS)) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(2.5)
        assert d.store.kept == [1.0, 2.0], "a sign of life five times in the life of a ticket that waits"
        d.store.ring(HOLDS)
        won = await acquiring
        assert (now(), won.place, won.ticket.counts_from, won.ticket.lives) == (2.5, HOLDS, 1002.0, WAITER_TTL)
        assert won.unanswered_calls == ()
        assert d.store.asked == [(0.0, won.ticket.claim.owner)]
        assert d.store.released == []


@pytest.mark.parametrize("news", [None, Place(34), Place(34, None, 2), Place(None, None, 4), Gone()], ids=repr)
@in_virtual_time
async def test_any_other_bell_says_that_the_store_has_to_be_asked(news):
    """A bell about another number may be about a ticket of this owner that died, and late."""
    async with desk(StoreWithLine(WAITS, keeps=[WAITS, HOLDS])) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1.5)
        d.store.ring(news)
        won = await acquiring
        assert (d.store.kept, won.ticket.counts_from, won.ticket.lives) == ([1.0, 1.5], 1001.5, TTL)
        assert d.store.numbers == [3, 3]


@in_virtual_time
async def test_a_bell_during_a_request_is_asked_about_when_that_is_answered():
    """Its answer may have left the store before."""
    async with desk(StoreWithLine(WAITS, keeps=[(0.5, WAITS), HOLDS])) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1.2)
        d.store.ring(None)
        await acquiring
        assert d.store.kept == [1.0, 1.5]


@in_virtual_time
async def test_a_bell_that_comes_before_the_answer_of_the_draw_is_asked_about():
    async with desk(StoreWithLine((0.5, WAITS), keeps=[HOLDS])) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(0.2)
        d.store.ring(HOLDS)
        await acquiring
        assert (d.store.kept, now()) == ([0.5], 0.5)


@in_virtual_time
async def test_the_first_that_waits_looks_when_those_that_hold_would_have_died():
    async with desk(StoreWithLine(WAITS._replace(look_after=0.5), keeps=[HOLDS])) as d:
        await d.run()
        assert d.store.kept == [0.52]


@in_virtual_time
async def test_a_bell_that_was_lost_is_made_good_by_the_next_sign_of_life():
    async with desk(StoreWithLine(WAITS, keeps=[WAITS, WAITS, HOLDS])) as d:
        won = await d.run()
        assert (now(), won.ticket.counts_from, won.ticket.lives) == (3.0, 1003.0, TTL)


@in_virtual_time
async def test_a_waiter_with_a_short_ttl_gives_more_signs_of_life():
    async with desk(StoreWithLine(WAITS, keeps=[WAITS, HOLDS]), ttl=1.0) as d:
        await d.run()
        assert d.store.kept == [0.2, 0.4]


@in_virtual_time
async def test_a_grant_after_a_silence_is_asked_about_again_once_its_life_may_be_over():
    """The bell is about the ticket of the latest answer, which is too old: it says nothing about the deadline."""
    async with desk(StoreWithLine(WAITS, keeps=[UNAVAILABLE])) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(WAITER_VALID + 0.1)
        d.store.keeps = [HOLDS]
        d.store.ring(HOLDS)
        won = await acquiring
        assert won.ticket.counts_from == pytest.approx(1000 + WAITER_VALID + 0.1)
        assert won.ticket.lives == TTL


@in_virtual_time
async def test_a_bell_heard_after_a_pause_of_the_process_is_asked_about_again():
    async with desk(StoreWithLine(WAITS, keeps=[WAITS, HOLDS])) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1.5)
        d.store.ring(HOLDS)
        block(VALID)
        won = await acquiring
        assert won.ticket.counts_from == 1001.5 + VALID


@in_virtual_time
async def test_a_ticket_that_died_is_drawn_again_by_the_same_owner():
    """The client slept, or could not reach the store; it is the last in the line now."""
    async with desk(StoreWithLine(WAITS, Place(35, None, 9), keeps=[Gone()])) as d:
        won = await d.run()
        assert (d.store.times, won.place.token) == ([0.0, 1.0], 35)
        assert len(set(d.store.owners)) == 1
        assert d.store.released == []


@in_virtual_time
async def test_a_ticket_that_the_store_lost_counts_as_lost_once_and_is_drawn_at_once():
    async with desk(StoreWithLine(WAITS, WAITS._replace(number=4), keeps=[Gone(), HOLDS._replace(number=4)])) as d:
        await d.run()
        assert (d.store.times, d.store.kept, d.store.numbers) == ([0.0, 1.0], [1.0, 2.0], [3, 4])


@pytest.mark.parametrize("fault", [UNAVAILABLE, ZeroDivisionError(), None], ids=repr)
@in_virtual_time
async def test_a_store_that_is_silent_to_a_waiter_is_asked_again_soon_and_for_one_ttl(fault):
    async with desk(StoreWithLine(WAITS, keeps=[fault])) as d:
        with pytest.raises(BackendUnavailableError):
            await d.run()
        assert TTL <= now() <= TTL + 1.3
        assert len(d.store.kept) > 20
        await settle()
        assert {owner for _, owner in d.store.released} == set(d.store.owners)


@in_virtual_time
async def test_a_silence_that_ends_is_forgotten():
    async with desk(StoreWithLine(WAITS, keeps=[*[UNAVAILABLE] * 20, WAITS, *[UNAVAILABLE] * 20, HOLDS])) as d:
        await d.run()
        assert now() > TTL


@in_virtual_time
async def test_a_draw_whose_answer_was_lost_finds_its_ticket():
    async with desk(StoreWithLine(UNAVAILABLE, WAITS, keeps=[HOLDS]), backoff=every(1)) as d:
        won = await d.run()
        assert len(set(d.store.owners)) == 1
        assert len(won.unanswered_calls) == 1


@in_virtual_time
async def test_a_waiter_that_gives_up_in_the_turn_of_its_bell_gives_its_ticket_back_at_once():
    async with desk(StoreWithLine(WAITS)) as d:
        acquiring = asyncio.create_task(d.run())
        await asyncio.sleep(1.5)
        d.store.ring(HOLDS)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await settle()
        assert d.store.released == [(1.5, d.store.owners[0])]
        assert not d.store.bells
        await asyncio.sleep(TTL)
        assert d.store.kept == [1.0], "and it is kept no more"


@in_virtual_time
async def test_a_waiter_whose_patience_ends_gives_its_ticket_back():
    async with desk(StoreWithLine(WAITS), wait=12.0) as d:
        with pytest.raises(AcquireTimeoutError) as over:
            await d.run()
        assert over.value.waited == now() == 12.0
        await settle()
        assert d.store.released == [(12.0, d.store.owners[0])]
        assert (d.abandoned, d.store.bells) == (0, {})


@in_virtual_time
async def test_asked_once_it_draws_no_ticket_that_would_have_to_wait():
    class Strict(StoreWithLine):
        async def draw(self, claim, *, only_if_it_holds=False):
            assert only_if_it_holds
            return await super().draw(claim)

    async with desk(Strict(Busy(4.0)), wait=0.0) as d:
        with pytest.raises(LockHeldError) as held:
            await d.run()
        assert held.value.retry_after == 4.0
        await settle()
        assert (d.store.asked, d.store.released, d.store.bells) == ([(0.0, d.store.owners[0])], [], {})


class OneByOne(ScriptedStore):
    """Has one connection: it carries out one call after the other, each in 20 ms."""

    def __init__(self, answer) -> None:
        super().__init__(answer)
        self.door = asyncio.Lock()
        self.began: dict[str, float] = {}

    async def draw(self, claim, **options):
        self.began[claim.owner] = LoopClock().now()
        async with self.door:
            await asyncio.sleep(0.02)
            return await super().draw(claim, **options)


class Silent(ScriptedStore):
    """Answers no call."""

    def __init__(self) -> None:
        super().__init__((math.inf, None))

    async def give_back(self, claim, **options):
        await asyncio.sleep(math.inf)


class Crowd:
    """Many acquisitions of one client."""

    def __init__(self, store: ScriptedStore, count: int, *, wait=None) -> None:
        self.desk = Desk(store, wait=wait)
        self.ends: list[float] = []
        self.tasks = [asyncio.ensure_future(self._run()) for _ in range(count)]

    async def _run(self) -> HeldTicket:
        try:
            return await self.desk.run()
        finally:
            self.ends.append(now())

    async def outcomes(self) -> list[HeldTicket | BaseException]:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


@in_virtual_time
async def test_what_a_client_cannot_send_yet_waits_and_counts_from_when_it_is_sent():
    store = OneByOne(Place(1))
    results = await Crowd(store, 2000).outcomes()  # 40 s, where a call may take 4
    assert all(isinstance(result, HeldTicket) for result in results)
    assert [result.ticket.claim.owner for result in results] == store.owners  # in the order in which they asked
    assert all(result.ticket.counts_from == store.began[result.ticket.claim.owner] for result in results)


@in_virtual_time
async def test_in_a_crowd_a_release_is_not_behind_the_tries_that_wait():
    store = OneByOne(Place(1))
    crowd = Crowd(store, 500)
    await asyncio.sleep(1.0)
    assert await crowd.desk.store_calls.release(Claim("a", TTL), VALID / 2)
    assert store.released[0][0] == 1.0
    assert len(store.began) < 200
    await crowd.outcomes()


@in_virtual_time
async def test_the_patience_of_those_that_wait_for_their_turn_ends_as_a_wait():
    results = await Crowd(OneByOne(Place(1)), 500, wait=3.0).outcomes()
    errors = [error for error in results if not isinstance(error, HeldTicket)]
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
    store = OneByOne(Place(1))
    crowd = Crowd(store, 300)
    await asyncio.sleep(0.1)
    for task in crowd.tasks[::2]:
        task.cancel()
    results = await crowd.outcomes()
    assert sum(isinstance(result, HeldTicket) for result in results) == 150 + sum(
        isinstance(result, HeldTicket) for result in results[::2]
    )
    assert all(task.cancelled() or task.result() for task in crowd.tasks)


@in_virtual_time
async def test_a_client_that_closes_sends_away_those_that_wait_for_their_turn():
    crowd = Crowd(OneByOne(Place(1)), 300)
    await asyncio.sleep(0.1)
    await crowd.desk.store_calls.aclose(10.0)
    results = await crowd.outcomes()
    assert {type(error) for error in results if not isinstance(error, HeldTicket)} == {UsageError}
    assert max(crowd.ends) < 3.0
