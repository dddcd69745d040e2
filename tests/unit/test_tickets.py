"""Tickets that wait, in the engine, on virtual time: signs of life, turns, and waiters that end at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import tenacity
from inside import LoopClock, memory_on
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import BackendUnavailableError, Lease, LossReason
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, Backoff, Terms
from fencing_sdk._engine.engine import Engine
from fencing_sdk._values.answer import Answer
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import WAITER_TTL
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import FaultyBackend

TTL, RTT = 15.0, 0.01


class AnsweringStore(MemoryBackend):
    """A store whose answers take a round trip, and are settled by its reader. A silent one loses each request."""

    silent = False

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, float]] = []
        self.given_up: list[str] = []

    def of(self, verb: str) -> list[float]:
        return [at for called, at in self.sent if called == verb]

    def _later(self, verb: str, settled):
        loop = asyncio.get_running_loop()
        answer: Answer = Answer(loop, lambda: self.given_up.append(verb))
        self.sent.append((verb, now()))
        if not self.silent:
            loop.call_later(RTT, lambda: answer.settle(settled.result()))
        return answer

    def draw(self, claim, *, only_if_it_holds=False):
        return self._later("draw", super().draw(claim, only_if_it_holds=only_if_it_holds))

    def keep(self, tickets):
        return self._later("keep", super().keep(tickets))

    def give_back(self, claim, *, after=0.0):
        return self._later("give_back", super().give_back(claim, after=after))


def terms(name: str = "a", *, wait: float | None = None, ttl: float = TTL) -> Terms:
    return Terms(name, name, Timing.build(ttl=ttl), wait, tenacity.wait_none())


@contextlib.asynccontextmanager
async def engine_on(store) -> AsyncIterator[Engine]:
    engine = Engine(store, LoopClock(), Observers([]), watch_stalls=False)
    await engine.start()
    yield engine
    await engine.aclose()


def waiting(engine: Engine, **options) -> asyncio.Task[Lease]:
    return asyncio.create_task(engine.hold(terms(**options), ()))


@in_virtual_time
async def test_a_waiter_that_dies_at_the_head_delays_the_next_by_its_short_life_at_most():
    table = memory_on(LoopClock())
    dying = FaultyBackend(table)
    async with engine_on(table) as ours, engine_on(dying) as theirs:
        held = await ours.hold(terms(), ())
        head = waiting(theirs)
        await asyncio.sleep(2.9)
        following = waiting(ours)
        await settle()
        for operation in ("acquire", "renew", "release"):
            dying.drop(operation)
        await asyncio.sleep(0.5)
        await held.release()
        released_at = now()
        lease = await following
        assert now() - released_at <= WAITER_TTL
        await lease.release()
        dying.heal()
        head.cancel()
        await asyncio.wait((head,))


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("make", [lambda: memory_on(LoopClock()), lambda: memory_on(LoopClock(), AnsweringStore)])
@in_virtual_time
async def test_a_waiter_that_is_cancelled_about_the_tick_of_its_bell_passes_on_at_once(make, turns):
    async with engine_on(store := make()) as engine:
        held = await engine.hold(terms(), ())
        head = waiting(engine)
        await asyncio.sleep(0.1)
        following = waiting(engine)
        await asyncio.sleep(0.1)
        releasing = asyncio.create_task(held.release())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not head.cancel():
            await head.result().release()
        lease = await following
        assert now() <= 0.2 + 4 * RTT
        await releasing
        await lease.release()
        await asyncio.sleep(1)
        assert await store.tickets(["a"]) == [[]]


@in_virtual_time
async def test_the_waiters_of_a_client_are_kept_by_two_requests_in_a_span_at_most():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:
        held = await engine.hold(terms(ttl=3600), ())
        waiters = []
        for _ in range(100):
            waiters.append(waiting(engine))
            await asyncio.sleep(0.013)
        store.sent.clear()
        await asyncio.sleep(10)
        assert 10 <= len(store.of("keep")) <= 22
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        await held.release()


@in_virtual_time
async def test_a_crowd_on_one_name_costs_two_requests_for_each_turn():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:

        async def turn() -> None:
            lease = await engine.hold(terms(), ())
            await lease.release()

        await asyncio.gather(*(turn() for _ in range(60)))
        sent = Counter(verb for verb, _ in store.sent)
        assert (sent["draw"], sent["give_back"]) == (60, 60)
        assert sent["keep"] <= 4


@in_virtual_time
async def test_draws_wait_for_no_turn_where_the_store_answers_by_its_reader():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:
        leases = await asyncio.gather(*(engine.hold(terms(f"n{number}"), ()) for number in range(500)))
        assert store.of("draw") == [0.0] * 500
        await asyncio.gather(*(lease.release() for lease in leases))


@in_virtual_time
async def test_a_draw_without_an_answer_is_given_up_at_its_limit():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:
        await (await engine.hold(terms(), ())).release()
        store.silent = True
        with pytest.raises(BackendUnavailableError, match=r"no answer within 2 s"):
            await engine.hold(terms(wait=1.0), ())
        assert (store.given_up[0], round(now(), 3)) == ("draw", 2 + 2 * RTT)
        store.silent = False


@in_virtual_time
async def test_a_ticket_of_a_bell_is_a_lease_for_what_is_left_of_its_short_life_until_it_is_kept():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:
        held = await engine.hold(terms(), ())
        following = waiting(engine)
        await asyncio.sleep(0.4)
        await held.release()
        lease = await following
        assert isinstance((await store.tickets(["a"]))[0][0].token, int)
        assert lease.remaining < WAITER_TTL < TTL
        assert store.of("keep") == []
        await asyncio.sleep(1)
        assert len(store.of("keep")) == 1
        assert lease.remaining > TTL / 2
        await lease.release()


class Lineless(AnsweringStore):
    """A store without a line, whose waiters try again."""

    rings = False

    def __init__(self) -> None:
        super().__init__()
        self.asked_by: list[str] = []

    def draw(self, claim, *, only_if_it_holds=False):
        self.asked_by.append(claim.owner)
        return super().draw(claim, only_if_it_holds=only_if_it_holds)


def polling(backoff: Backoff, wait: float | None = None) -> Terms:
    return Terms("a", "a", Timing.build(ttl=TTL), wait, backoff)


SELDOM = tenacity.wait_fixed(60)


@in_virtual_time
async def test_waiters_of_one_client_ask_a_store_without_a_line_one_after_the_other():
    """Only the first of them asks; a release by the client lets it ask at once, and so on."""
    store, order = memory_on(LoopClock(), Lineless), list[int]()
    async with engine_on(store) as engine:
        held = await engine.hold(polling(SELDOM), ())

        async def visit(number: int) -> None:
            lease = await engine.hold(polling(SELDOM), ())
            order.append(number)
            await asyncio.sleep(0.5)
            await lease.release()

        visits = []
        for number in range(10):
            visits.append(asyncio.ensure_future(visit(number)))
            await asyncio.sleep(2 * RTT)
        assert len(set(store.asked_by)) == len(store.asked_by) == 2
        released_at = now()
        await held.release()
        await asyncio.gather(*visits)
        assert order == list(range(10))
        assert now() - released_at < 10
        assert len(store.asked_by) <= 2 + 2 * len(visits)
        assert not engine._store_calls.polling


@in_virtual_time
async def test_the_first_waiter_asks_a_store_without_a_line_as_often_after_a_minute_as_before():
    store = memory_on(LoopClock(), Lineless)
    async with engine_on(store) as engine:
        held = await engine.hold(polling(DEFAULT_BACKOFF), ())
        waiter = asyncio.ensure_future(engine.hold(polling(DEFAULT_BACKOFF), ()))
        await asyncio.sleep(2 * RTT)
        late = asyncio.ensure_future(engine.hold(polling(DEFAULT_BACKOFF, wait=1), ()))
        await asyncio.sleep(60)
        assert isinstance(late.exception(), TimeoutError)
        asked = store.of("draw")
        assert max(later - earlier for earlier, later in itertools.pairwise(asked[1:])) <= 0.6 + 2 * RTT
        assert len(asked) < 240
        await held.release()
        await (await waiter).release()


@in_virtual_time
async def test_a_waiter_that_leaves_lets_the_next_one_ask():
    """Three that come in one moment ask once each; then the first asks for all."""
    store = memory_on(LoopClock(), Lineless)
    async with engine_on(store) as engine:
        held = await engine.hold(polling(SELDOM), ())
        quick = polling(tenacity.wait_fixed(0.5))
        waiters = [asyncio.ensure_future(engine.hold(quick, ())) for _ in range(3)]
        await asyncio.sleep(5)
        asked = Counter(store.asked_by[1:])
        assert sorted(asked.values())[:2] == [1, 1]
        assert asked.most_common(1)[0][1] >= 9
        first = next(waiter for waiter, owner in zip(waiters, asked, strict=True) if asked[owner] > 1)
        first.cancel()
        await settle()
        assert len(store.asked_by) == 1 + asked.total() + 1
        await held.release()
        for waiter in waiters:
            if waiter is not first:
                await (await waiter).release()
        assert not engine._store_calls.polling


@in_virtual_time
async def test_a_bell_during_a_renewal_is_asked_about_when_that_is_answered():
    async with engine_on(store := memory_on(LoopClock(), AnsweringStore)) as engine:
        lease = await engine.hold(terms(), ())
        (bell,) = store._bells.values()
        await asyncio.sleep(3 - RTT / 2)  # its first renewal has reached the store
        assert len(store.of("keep")) == 1
        store._lines._lines.clear()
        bell(None)
        await asyncio.sleep(3 * RTT)
        assert lease.lost_reason is LossReason.REFUSED
        await lease.release()
