"""Requests that vanish without a word, answers that never come, requests that arrive twice: and the client on top."""

import asyncio
import contextlib
from collections import Counter

import pytest
from inside import LoopClock, memory_on, on_clock
from looking import holder

from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing import FaultyBackend, World

CALLS = {
    "acquire": lambda backend: backend.draw(Claim("a", 60)),
    "renew": lambda backend: backend.keep([(Claim("a", 60), 0)]),
    "release": lambda backend: backend.give_back(Claim("a", 60)),
    "inspect": lambda backend: backend.tickets(["a"]),
}
VERBS = {"acquire": "draw", "renew": "keep", "release": "give_back", "inspect": "tickets"}
"""What arrives at the store."""
every_operation = pytest.mark.parametrize("operation", CALLS)


class Store:
    """Counts what arrives at a memory backend."""

    def __init__(self) -> None:
        self.memory = MemoryBackend(tokens="counter")
        self.arrived: Counter[str] = Counter()

    def __getattr__(self, operation):
        found = getattr(self.memory, operation)
        if not callable(found):
            return found

        def arrive(*arguments, **options):
            self.arrived[operation] += 1
            return found(*arguments, **options)

        return arrive


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def backend(store):
    return FaultyBackend(store)


async def is_waited_for(call) -> bool:
    """Whether *call* is still without an answer when everything that was ready has run; it is given up then."""
    task = asyncio.ensure_future(call)
    for _ in range(20):
        await asyncio.sleep(0)
    waited = not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return waited


@every_operation
async def test_a_dropped_request_never_arrives_and_nobody_says_so(backend, store, operation):
    backend.drop(operation, times=1)
    assert await is_waited_for(CALLS[operation](backend))
    assert not store.arrived
    await CALLS[operation](backend)
    assert store.arrived == {VERBS[operation]: 1}


@every_operation
async def test_a_request_may_be_applied_without_any_answer(backend, store, operation):
    backend.lose_reply(operation, silent=True, times=1)
    assert await is_waited_for(CALLS[operation](backend))
    assert store.arrived == {VERBS[operation]: 1}


@every_operation
async def test_a_duplicated_request_is_answered_and_arrives_twice(backend, store, operation):
    backend.duplicate(operation, times=1)
    await CALLS[operation](backend)
    await backend.delivered()
    assert store.arrived == {VERBS[operation]: 2}
    await CALLS[operation](backend)
    await backend.delivered()
    assert store.arrived == {VERBS[operation]: 3}


async def test_the_copy_of_a_request_comes_late_and_after_its_caller_has_left(backend, store):
    claim = Claim("a", 60)
    backend.duplicate("acquire", 0.5, times=1)
    assert isinstance(await backend.draw(claim), Place)
    for _ in range(10):
        await asyncio.sleep(0)
    assert store.arrived == {"draw": 1}
    await backend.give_back(claim)
    await backend.delivered()
    assert (await holder(backend, "a")).token == 2, "the late copy has taken the lock again"


async def test_a_copy_is_on_its_way_although_the_first_request_was_given_up(store):
    slow = FaultyBackend(store)
    slow.drop("acquire", times=1)
    backend = FaultyBackend(slow)
    backend.duplicate("acquire", 0.01)
    assert await is_waited_for(backend.draw(Claim("a", 60)))
    await backend.delivered()
    assert store.arrived == {"draw": 1}


@pytest.mark.parametrize("fault", ["drop", "duplicate"])
def test_a_misspelt_operation_is_refused(backend, fault):
    with pytest.raises(ConfigurationError, match="operation must be one of"):
        getattr(backend, fault)("renews")


def in_a_world(work):
    """Run *work* in a client of a world: on virtual time an unanswered call costs nothing."""
    with World() as world:
        return world.client("host").run(work)


@pytest.mark.parametrize("fault", ["drop", "lose_reply"])
def test_a_client_rides_out_renewals_without_a_word(fault):
    async def work():
        backend = FaultyBackend(MemoryBackend(tokens="counter"))
        async with LockClient(backend) as locks:
            lease = await locks.lock("a", ttl=3600).acquire()
            silent = {"silent": True} if fault == "lose_reply" else {}
            getattr(backend, fault)("renew", times=1, **silent)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lease.renew(), 10)
            assert lease.held
            await lease.renew()
            await lease.release()
            return backend.calls

    assert [operation for operation, _ in in_a_world(work)].count("renew") == 2


def test_a_late_copy_of_an_acquisition_does_not_keep_the_lock():
    """P5: nobody knows of the copy, so nobody renews it, and the ttl frees the lock."""

    async def work():
        store = memory_on(LoopClock(), tokens="counter")
        backend = FaultyBackend(store)
        async with on_clock(LockClient(backend), LoopClock()) as locks:
            backend.duplicate("acquire", 0.05, times=1)
            async with locks.lock("a", ttl=1):
                pass
            await backend.delivered()
            await asyncio.sleep(1.1)
            return await holder(store, "a")

    assert in_a_world(work) is None


def test_a_duplicated_renewal_is_no_second_opinion():
    async def work():
        backend = FaultyBackend(MemoryBackend(tokens="counter"))
        backend.duplicate("renew")
        claim = Claim("a", 60)
        place = await backend.draw(claim)
        assert await backend.keep([(claim, 0)]) == [place]
        await backend.give_back(claim)
        await backend.delivered()
        return await holder(backend, "a")

    assert in_a_world(work) is None, "the copy of a renewal must not create what was released"
