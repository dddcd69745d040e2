"""``@holding``: a function that is called without its lock is refused before its body begins."""

import asyncio
import inspect

import pytest

from fencing_sdk import ConfigurationError, LeaseLostError, LockClient, NoLeaseError, current_token, holding
from fencing_sdk.backends.memory import MemoryBackend


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
async def locks(store):
    async with LockClient(store) as locks:
        yield locks


@holding("accounts/{account_id}")
async def withdraw(account_id, cents):
    return current_token(), cents


@holding("accounts/{account_id}")
def withdraw_at_once(account_id, cents):
    return current_token(), cents


class Account:
    def __init__(self, account_id):
        self.account_id = account_id

    @holding("accounts/{self.account_id}")
    async def withdraw(self, cents):
        return current_token(), cents

    @holding("accounts/{self.account_id}")
    def withdraw_at_once(self, cents):
        return current_token(), cents


async def outcome(value):
    return await value if inspect.isawaitable(value) else value


CALLS = {
    "async": lambda: withdraw(7, cents=5),
    "plain": lambda: withdraw_at_once(7, cents=5),
    "async method": lambda: Account(7).withdraw(5),
    "plain method": lambda: Account(7).withdraw_at_once(5),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.every_loop
async def test_under_its_lock_a_function_runs(locks, call):
    async with locks.lock("accounts/7"):
        assert await outcome(call()) == (1, 5)


@calls
async def test_without_its_lock_a_function_does_not_begin(locks, call):
    for name in ("accounts/8", "accounts"):
        async with locks.lock(name):
            with pytest.raises(NoLeaseError, match="accounts/7"):
                await outcome(call())


@calls
async def test_after_the_loss_of_its_lock_a_function_does_not_begin(locks, store, call):
    with pytest.raises(LeaseLostError):
        async with locks.lock("accounts/7"):
            store.take_away("accounts/7")
            with pytest.raises(LeaseLostError, match="accounts/7"):
                await outcome(call())


async def test_a_coroutine_is_judged_when_its_body_begins(locks):
    async with locks.lock("accounts/7"):
        late = withdraw(7, 5)
    with pytest.raises(NoLeaseError):
        await late


async def test_a_task_that_outlives_the_lock_of_its_parent_is_refused(locks):
    released = asyncio.Event()

    async def later():
        assert await withdraw(7, 5) == (1, 5)
        await released.wait()
        await withdraw(7, 5)

    async with locks.lock("accounts/7"):
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    released.set()
    with pytest.raises(LeaseLostError):
        await task


async def test_each_lock_of_several_counts(locks):
    async with locks.lock("accounts/7"), locks.lock("accounts/8"):
        assert await withdraw(7, 1) == await withdraw(8, 1) == (current_token("accounts/8"), 1), "the innermost"


async def test_a_plain_handle_is_in_no_context(locks):
    async with await locks.lock("accounts/7").acquire():
        with pytest.raises(NoLeaseError):
            await withdraw(7, 5)


def test_the_function_stays_what_it_was():
    assert inspect.iscoroutinefunction(withdraw)
    assert not inspect.iscoroutinefunction(withdraw_at_once)
    assert withdraw.__name__ == "withdraw"
    assert list(inspect.signature(withdraw).parameters) == ["account_id", "cents"]


def generator():
    yield


async def async_generator():
    yield


@pytest.mark.parametrize("function", [generator, async_generator, Account, 7])
def test_what_has_no_body_that_begins_once_is_refused(function):
    with pytest.raises(ConfigurationError, match=r"holding\(\)"):
        holding("a")(function)


def test_a_placeholder_names_a_parameter():
    with pytest.raises(ConfigurationError, match="account_number"):
        holding("accounts/{account_number}")(lambda account_id: None)
    with pytest.raises(ConfigurationError):
        holding("")
