"""The bad network does what a test asks of it, as often as it was asked, and nothing else."""

import asyncio
import inspect
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from looking import holder

from fencing_sdk import connect
from fencing_sdk.abc import Claim, PassesOn, Place
from fencing_sdk.abc._powers import SupportsInit, SupportsSchema
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError
from fencing_sdk.testing import FaultyBackend

CALLS = {
    "acquire": lambda backend: backend.draw(Claim("a", 60)),
    "renew": lambda backend: backend.keep([(Claim("a", 60), 0)]),
    "release": lambda backend: backend.give_back(Claim("a", 60)),
    "inspect": lambda backend: backend.tickets(["a"]),
}
every_operation = pytest.mark.parametrize("operation", CALLS)


class Store(MemoryBackend):
    """Counts what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: Counter[str] = Counter()
        self.closed = False

    async def draw(self, claim, **options):
        self.arrived["acquire"] += 1
        return await super().draw(claim, **options)

    async def keep(self, tickets):
        self.arrived["renew"] += 1
        return await super().keep(tickets)

    async def give_back(self, claim, **options):
        self.arrived["release"] += 1
        await super().give_back(claim, **options)

    async def tickets(self, names):
        self.arrived["inspect"] += 1
        return await super().tickets(names)

    async def aclose(self):
        self.closed = True


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def backend(store):
    return FaultyBackend(store)


async def test_calls_are_listed_in_order_whatever_became_of_them(backend):
    backend.fail("acquire")
    with pytest.raises(BackendUnavailableError):
        await backend.draw(Claim("a", 60))
    await backend.keep([(Claim("a", 60), 0), (Claim("b", 60), 0)])
    await holder(backend, "c")
    assert backend.calls == [("acquire", ("a",)), ("renew", ("a", "b")), ("inspect", ("c",))]


@every_operation
async def test_a_failed_request_never_arrives(backend, store, operation):
    backend.fail(operation)
    with pytest.raises(BackendUnavailableError) as raised:
        await CALLS[operation](backend)
    assert raised.value.operation == operation
    assert not store.arrived


async def test_a_failure_may_be_any_error_and_its_traceback_does_not_grow(backend):
    backend.fail("acquire", ConnectionResetError("by peer"))
    depths = []
    for _ in range(3):
        with pytest.raises(ConnectionResetError, match="by peer") as raised:
            await backend.draw(Claim("a", 60))
        depths.append(len(inspect.getinnerframes(raised.tb)))
    assert len(set(depths)) == 1


@every_operation
async def test_a_request_whose_answer_is_lost_was_applied(backend, store, operation):
    backend.lose_reply(operation)
    with pytest.raises(BackendUnavailableError):
        await CALLS[operation](backend)
    assert store.arrived == {operation: 1}


@every_operation
async def test_a_straggling_request_arrives_after_its_caller_gave_up(backend, store, operation):
    backend.straggle(operation, 0.01)
    with pytest.raises(BackendUnavailableError):
        await CALLS[operation](backend)
    assert not store.arrived
    await backend.delivered()
    assert store.arrived == {operation: 1}


async def test_a_straggler_arrives_although_the_client_closed_meanwhile(backend, store):
    backend.straggle("acquire", 0.01)
    with pytest.raises(BackendUnavailableError):
        await backend.draw(Claim("a", 60))
    await backend.aclose()
    await backend.delivered()
    assert await holder(store, "a") is not None


async def test_an_error_of_a_straggler_is_nobodys(store):
    inner = FaultyBackend(store)
    inner.fail("acquire", RuntimeError("nobody is there to see this"))
    outer = FaultyBackend(inner)
    outer.straggle("acquire", 0)
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with pytest.raises(BackendUnavailableError):
        await outer.draw(Claim("a", 60))
    await outer.delivered()
    assert inner.calls
    assert not unhandled


async def test_a_delayed_request_is_held_back_and_then_answered(backend, store):
    backend.delay("acquire", 0.05)
    call = asyncio.create_task(backend.draw(Claim("a", 60)))
    await asyncio.sleep(0)
    assert not store.arrived
    assert isinstance(await call, Place)


async def test_a_hanging_call_can_be_cancelled_and_was_not_applied(backend, store):
    backend.hang("acquire")
    call = asyncio.create_task(backend.draw(Claim("a", 60)))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait((call,), timeout=5)
    assert call.cancelled()
    assert not store.arrived


async def test_a_stubborn_call_ignores_every_cancellation_until_its_time_is_over(backend):
    backend.hang("acquire", 0.1, stubborn=True)
    call = asyncio.create_task(backend.draw(Claim("a", 60)))
    for _ in range(5):
        await asyncio.sleep(0)
        call.cancel()
    assert isinstance(await call, Place)


@pytest.mark.parametrize(
    "fault",
    [
        lambda backend: backend.fail("renews"),
        lambda backend: backend.delay("Acquire", 1),
        lambda backend: backend.lose_reply("aclose"),
        lambda backend: backend.straggle("", 1),
        lambda backend: backend.hang(None),
        lambda backend: backend.heal("renews"),
    ],
)
def test_a_misspelt_operation_is_refused_because_its_fault_would_never_happen(backend, fault):
    with pytest.raises(ConfigurationError, match="operation must be one of acquire, renew, release, inspect"):
        fault(backend)


@pytest.mark.parametrize("times", [0, -1])
def test_a_fault_that_happens_no_times_is_refused(backend, times):
    with pytest.raises(ConfigurationError, match="times must be at least 1"):
        backend.fail("acquire", times=times)


class Faults(RuleBasedStateMachine):
    """Any faults, any number of times, in any order: each call meets the first one that is not used up."""

    KINDS = ("fail", "lose_reply", "straggle", "delay", "hang")

    @initialize()
    def begin(self):
        self.store = Store()
        self.backend = FaultyBackend(self.store)
        self.waiting: dict[str, list[list]] = {operation: [] for operation in CALLS}
        self.calls = 0
        self.arrivals: Counter[str] = Counter()
        self.runner = asyncio.Runner()

    @rule(operation=st.sampled_from(sorted(CALLS)), kind=st.sampled_from(KINDS), times=st.sampled_from([1, 2, 3, None]))
    def add(self, operation: str, kind: str, times: int | None):
        arguments = (0.0,) if kind in {"straggle", "delay", "hang"} else ()
        getattr(self.backend, kind)(operation, *arguments, times=times)
        self.waiting[operation].append([kind, times])

    @rule(operation=st.sampled_from([None, *sorted(CALLS)]))
    def heal(self, operation: str | None):
        self.backend.heal(operation)
        for healed in CALLS if operation is None else (operation,):
            self.waiting[healed] = []

    @rule(operation=st.sampled_from(sorted(CALLS)), again=st.integers(1, 4))
    def call(self, operation: str, again: int):
        for _ in range(again):
            kind = self.next_kind(operation)
            answered = self.runner.run(self.answered(operation))
            assert answered is (kind in {"none", "delay", "hang"})
            self.arrivals[operation] += kind != "fail"
            self.calls += 1
        assert self.store.arrived == +self.arrivals
        assert len(self.backend.calls) == self.calls

    def next_kind(self, operation: str) -> str:
        faults = self.waiting[operation]
        if not faults:
            return "none"
        kind, times = faults[0]
        if times is not None:
            faults[0][1] -= 1
            if faults[0][1] == 0:
                del faults[0]
        return kind

    async def answered(self, operation: str) -> bool:
        try:
            await CALLS[operation](self.backend)
        except BackendUnavailableError:
            await self.backend.delivered()
            return False
        return True

    def teardown(self):
        if hasattr(self, "runner"):
            self.runner.close()


async def test_permits_readers_lists_and_revocations_of_the_store_are_passed_on():
    network = FaultyBackend(MemoryBackend(tokens="counter"))
    async with connect(network) as locks:
        async with locks.semaphore("pool", permits=2), locks.rwlock("catalog").reader:
            assert [holder.name async for holder in locks.all_holders()] in (["pool", "catalog"], ["catalog", "pool"])
            assert len(await locks.holders("pool")) == 1
            network.fail("inspect", times=1)
            with pytest.raises(BackendUnavailableError):
                await locks.holders("pool")
        lease = await locks.lock("a").acquire()
        assert await locks.revoke("a", token=lease.token, reason="a test")


@pytest.mark.parametrize("power", [PassesOn, SupportsSchema, SupportsInit])
def test_a_power_that_the_store_lacks_is_lacking_behind_the_network_too(power):
    assert isinstance(FaultyBackend(MemoryBackend()), power) is isinstance(MemoryBackend(), power)
    assert not isinstance(FaultyBackend(Bare()), power)


class Bare:
    """The verbs and nothing else."""

    modes, rings = {"lock"}, False
    draw = keep = give_back = end = tickets = names = listen = aclose = None


@pytest.mark.parametrize("bells", [True, False])
async def test_without_bells_none_is_passed_on(bells):
    store, heard = MemoryBackend(), []
    network = FaultyBackend(store, bells=bells)
    first, second = Claim("a", 60), Claim("a", 60)
    await network.draw(first)
    stop = network.listen(second, heard.append)
    await network.draw(second)
    await network.give_back(first)
    await asyncio.sleep(0)
    assert len(heard) == bells
    stop()
