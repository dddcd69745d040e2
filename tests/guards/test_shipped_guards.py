"""What is true of every guard that is shipped, and more than the contract asks for."""

import asyncio
import pkgutil
from contextlib import AsyncExitStack

import pytest

from fencing_sdk import (
    ConfigurationError,
    LeaseLostError,
    LockClient,
    StaleTokenError,
    Token,
    UnsupportedError,
    guards,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.files import FileGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.testing.guard_promises.fences import NO_RESOURCES

pytest_plugins = ["redis_fixtures", "postgresql_fixtures", "etcd_fixtures", "kahuna_fixtures"]

SHIPPED = {
    "memory": lambda path: MemoryGuard(),
    "sql": lambda path: SqlGuard(path / "app.db"),
    "files": lambda path: FileGuard(path / "files"),
}


SERVED = {"redis": RedisGuard, "etcd": EtcdGuard, "kahuna": KahunaGuard}


@pytest.fixture(params=[*SHIPPED, *SERVED, "sql on a server"])
async def guard(request, tmp_path, redis_server, etcd_server, kahuna_server):
    servers = {"redis": redis_server, "etcd": etcd_server, "kahuna": kahuna_server}
    async with AsyncExitStack() as stack:
        if request.param in SERVED:
            yield await stack.enter_async_context(SERVED[request.param](servers[request.param].url))
        elif request.param == "sql on a server":
            yield SqlGuard(request.getfixturevalue("postgresql_server").url)
        else:
            yield SHIPPED[request.param](tmp_path)


def test_the_list_is_complete():
    assert {module.name for module in pkgutil.iter_modules(guards.__path__) if module.name[0] != "_"} == {
        *SHIPPED,
        *SERVED,
    }


@pytest.mark.parametrize("guard", SERVED, indirect=True)
async def test_a_guard_that_was_closed_opens_again_and_is_closed_again(guard):
    """One behaviour for all guards with connections of their own: no connection is left behind."""
    for token in (34, 35):
        async with guard:
            await guard.raise_to("a", token)
    await guard.raise_to("a", 36)
    await guard.aclose()
    await guard.aclose()


def test_every_guard_says_whether_it_takes_several_resources_in_one_step(guard):
    assert callable(guard.admit_all)


async def test_a_guard_that_takes_one_resource_at_a_time_says_so(tmp_path):
    with pytest.raises(UnsupportedError, match="one resource at a time"):
        await FileGuard(tmp_path).admit_all({"a": 1, "b": 2})


async def test_a_refusal_of_several_is_told_with_the_resource_and_the_holder_that_were_refused():
    events = []
    guard = MemoryGuard(observers=[events.append])
    await guard.raise_to("b", 34)
    with pytest.raises(StaleTokenError):
        guard.admit_all({"a": Token(40, "aaaaaaaa"), "b": Token(33, "bbbbbbbb")})
    (refused,) = (event for event in events if event.kind == "stale_rejected")
    assert (refused.resource, refused.token, refused.holder) == ("b", 33, "bbbbbbbb")


@pytest.mark.parametrize("resource", NO_RESOURCES, ids=lambda resource: ascii(resource)[:20])
async def test_asking_for_what_names_no_resource_is_an_error(guard, resource):
    with pytest.raises(ConfigurationError):
        await guard.highest(resource)


async def test_a_fence_that_is_ahead_fails_the_acquisition_and_gives_the_lock_back(guard):
    """The store forgot what it had granted, and the resource did not."""
    await guard.raise_to("invoices/42", 1_000)
    store = MemoryBackend(tokens="counter")
    async with LockClient(store) as locks:
        with pytest.raises(StaleTokenError):
            async with locks.lock("invoices/42", fences=[guard]):
                pytest.fail("the body must not run")
        assert await locks.inspect("invoices/42") is None


@pytest.mark.every_loop
async def test_a_resource_may_be_named_unlike_its_lock(guard):
    async with LockClient(MemoryBackend()) as locks, locks.lock("a", fences=[(guard, "b"), (guard, "c")]) as lease:
        assert await guard.highest("a") is None
        assert [await guard.highest("b"), await guard.highest("c")] == [lease.token] * 2
        assert (await guard.highest("b")).holder == lease.holder


async def test_a_refusal_leaves_the_body_bare_and_is_told_to_the_clients_observers(guard):
    events, store = [], MemoryBackend()
    async with LockClient(store, observers=[events.append]) as locks:
        zombie = await locks.lock("a").acquire()
        stale = zombie.token
        store.take_away("a")
        async with locks.lock("a", fences=[guard]):
            with pytest.raises(StaleTokenError):
                await guard.raise_to("a", stale)
        with pytest.raises(StaleTokenError):
            async with locks.lock("b"):
                await guard.raise_to("a", stale)
    assert [event.kind for event in events if event.kind in {"fence_raised", "stale_rejected"}] == [
        "fence_raised",
        "stale_rejected",
    ]


async def test_a_fence_that_takes_too_long_costs_the_lease_and_not_its_safety(tmp_path):
    """The acquisition ends with the lease it was about, and the lock is free for others."""

    class Slow(MemoryGuard):
        async def raise_to(self, resource, token):
            await asyncio.sleep(30)

    async with LockClient(MemoryBackend()) as locks:
        with pytest.raises(LeaseLostError):
            await locks.lock("a", ttl=0.3, max_hold=0.2, fences=[Slow()]).acquire()
        assert await locks.inspect("a") is None
