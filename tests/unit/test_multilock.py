"""``locks.multilock``: several locks, held together or not at all."""

import asyncio
import random

import pytest
from inside import LoopClock, memory_on, on_clock
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import (
    AcquireTimeoutError,
    ConfigurationError,
    InvalidNameError,
    LeaseLostError,
    LockClient,
    LossReason,
    UsageError,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.recipes import holding

NAMES = ("accounts/1", "accounts/2", "accounts/3")


def make_client(store=None, **options):
    clock = LoopClock()
    return on_clock(LockClient(store or memory_on(clock, tokens="counter"), **options), clock)


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
async def locks(store):
    async with LockClient(store) as locks:
        yield locks


async def free(locks, *names):
    return [await locks.inspect(name) for name in names] == [None] * len(names)


async def test_functions_that_need_one_of_the_locks_can_be_called(locks):
    @holding("accounts/{account}")
    def balance(account):
        return account

    async with locks.multilock("accounts/7", "accounts/1"):
        assert [balance(1), balance(7)] == [1, 7]
        with pytest.raises(NoLeaseError):
            balance(2)


async def test_callers_that_need_the_same_locks_never_wait_in_a_circle(locks):
    """Each names them in an order of its own."""
    chance = random.Random(7)

    async def work():
        for _ in range(10):
            async with locks.multilock(*chance.sample(NAMES, 2)):
                await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(*(work() for _ in range(8)))
    assert await free(locks, *NAMES)


async def test_names_are_acquired_in_the_order_of_the_store(store):
    """Which compares bytes: neither a locale nor the case of a letter decides."""
    names, asked = ["b", "Z", "a/2", "a", "ä", "a/10", "\N{LOCK}", "\uffff"], []

    class Noting(MemoryBackend):
        async def draw(self, claim, **options):
            asked.append(claim.name)
            return await super().draw(claim, **options)

    async with LockClient(Noting(), namespace="shop") as locks, locks.multilock(*names):
        assert asked == sorted(asked, key=str.encode)
        assert len(asked) == len(names)


@in_virtual_time
async def test_the_patience_is_one_for_all():
    """The first lock takes three of the five seconds, so that the second has two."""
    async with make_client() as locks, await locks.lock("b").acquire():
        first = await locks.lock("a").acquire()
        asyncio.get_running_loop().call_later(3, lambda: asyncio.ensure_future(first.release()))
        began = now()
        with pytest.raises(AcquireTimeoutError) as refusal:
            async with locks.multilock("a", "b", wait=5):
                pytest.fail("the body must not run")
        assert now() - began == pytest.approx(5, abs=0.1)
        assert refusal.value.name == "b"
        assert refusal.value.waited == pytest.approx(5, abs=0.1)
        assert await free(locks, "a")


@in_virtual_time
async def test_a_patience_that_is_over_leaves_one_try_and_tells_that_it_was_over():
    """The caller did wait, so no advice says to pass ``wait=``."""
    async with make_client() as locks:
        first = await locks.lock("a").acquire()

        class Late(LoopClock):
            late = 0.0

            def now(self):
                return super().now() + self.late

        clock = Late()
        both = locks.multilock("a", "b", wait=5)
        both._clock = clock
        asyncio.get_running_loop().call_later(1, lambda: asyncio.ensure_future(first.release()))
        asyncio.get_running_loop().call_later(0.5, lambda: setattr(clock, "late", 60.0))
        async with both as held:  # the last try succeeds
            assert list(held) == ["a", "b"]
        clock.late = 0.0
        async with await locks.lock("b").acquire():
            first = await locks.lock("a").acquire()
            asyncio.get_running_loop().call_later(1, lambda: asyncio.ensure_future(first.release()))
            asyncio.get_running_loop().call_later(0.5, lambda: setattr(clock, "late", 60.0))
            with pytest.raises(AcquireTimeoutError):
                async with both:
                    pytest.fail("the body must not run")


@pytest.mark.parametrize("lost", NAMES)
async def test_losing_one_cancels_the_body_and_the_error_names_it(locks, store, lost):
    reached = False
    with pytest.raises(LeaseLostError) as loss:
        async with locks.multilock(*NAMES) as held:
            store.take_away(lost)
            await asyncio.sleep(0)
            with pytest.raises(LeaseLostError, match=lost):
                held.check()
            with pytest.raises(LeaseLostError, match=lost):
                _ = held.tokens
            await asyncio.Event().wait()
            reached = True
    assert not reached
    assert (loss.value.name, loss.value.reason) == (lost, LossReason.REVOKED)
    assert await free(locks, *NAMES)


async def test_losing_one_while_another_is_waited_for_ends_the_wait(locks, store):
    async with await locks.lock("accounts/2").acquire():
        asyncio.get_running_loop().call_later(0.01, store.take_away, "accounts/1")
        with pytest.raises(LeaseLostError, match="accounts/1"):
            async with locks.multilock(*NAMES):
                pytest.fail("the body must not run")
        assert await free(locks, "accounts/1", "accounts/3")


async def test_an_error_of_the_body_is_told_of_the_loss(locks, store):
    with pytest.raises(ValueError) as left:
        async with locks.multilock(*NAMES):
            store.take_away("accounts/2")
            raise ValueError("mine")
    assert "accounts/2" in "".join(left.value.__notes__)


async def test_an_outer_cancellation_wins_and_frees_all(locks):
    async def work():
        async with locks.multilock(*NAMES):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await settle()
    assert not await free(locks, "accounts/3")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await free(locks, *NAMES)


async def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing(locks):
    async with locks.lock("accounts/3"):
        task = asyncio.create_task(locks.multilock(*NAMES).__aenter__())
        await settle()
        assert not await free(locks, "accounts/2")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert await free(locks, "accounts/1", "accounts/2")


async def test_every_lock_raises_the_fence_of_its_own_name(locks):
    ledger = MemoryGuard()
    async with locks.lock("accounts/2"):
        pass  # so that the tokens differ
    async with locks.multilock(*NAMES, fences=[ledger]) as held:
        assert {name: await ledger.highest(name) for name in NAMES} == held.tokens
        assert len(set(held.tokens.values())) > 1


async def test_left_by_another_task_all_are_released_and_the_error_says_so(locks):
    several = locks.multilock("a", "b")
    await several.__aenter__()
    with pytest.raises(UsageError, match="another"):
        await asyncio.create_task(several.__aexit__(None, None, None))
    assert await free(locks, "a", "b")


def test_it_shows_its_names_in_order():
    several = make_client().multilock("b", "a", "7")
    assert several.names == ("7", "a", "b")
    assert repr(several) == "<MultiLock '7', 'a', 'b'>"


async def test_what_is_held_shows_names_and_tokens_and_never_an_owner(locks):
    async with locks.multilock("b", "a") as held:
        assert "'a' token=1" in repr(held)
        assert all(lease.owner not in repr(held) for lease in held.values())
        assert held.get("c") is None
        assert len(held) == 2


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ((), {}, "needs names"),
        (("a", "b", "a"), {}, "'a' twice"),
        ((["a", "b"],), {}, r"multilock\(\*names\)"),
        (("a", "b"), {"wait": -1}, "wait"),
        (("a", "b"), {"ttl": 0}, "ttl"),
        (("a", "b"), {"fences": [(MemoryGuard(), "c")]}, "without a resource"),
        (("a", "b"), {"fences": MemoryGuard()}, "fences must be"),
    ],
)
def test_bad_input_is_refused_when_built(names, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_client().multilock(*names, **options)


def test_a_name_that_is_none_is_the_fault_of_a_request():
    with pytest.raises(InvalidNameError):
        make_client().multilock("a", "")
