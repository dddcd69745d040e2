"""The client: where it gets its backend, what its locks share, and how it is opened and closed."""

import asyncio
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio
from kazoo.client import KazooClient
from looking import holder
from virtual_time import settle

from fencing_sdk import (
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    UsageError,
    connect,
    sync,
)
from fencing_sdk.abc import Claim
from fencing_sdk.backends import from_url
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

# Connecting


def test_connecting_needs_no_loop_and_opens_nothing():
    assert repr(connect("memory://")) == "<LockClient on MemoryBackend, closed>"


def test_connecting_takes_a_backend_object():
    assert isinstance(connect(MemoryBackend()), LockClient)


def test_connecting_without_a_url_reads_the_environment(monkeypatch):
    monkeypatch.setenv("FENCING_URL", "memory://")
    assert "MemoryBackend" in repr(connect())


def test_a_url_that_is_given_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("FENCING_URL", "nonsense://")
    assert "MemoryBackend" in repr(connect("memory://"))


def test_connecting_without_any_url_names_the_variable(monkeypatch):
    monkeypatch.delenv("FENCING_URL", raising=False)
    with pytest.raises(ConfigurationError, match="FENCING_URL"):
        connect()


@pytest.mark.parametrize("options", [{}, {"tokens": "counter"}], ids=str)
@pytest.mark.parametrize("url", [5, b"memory://", Path("locks.db"), object(), MemoryBackend])
def test_what_is_neither_a_url_nor_a_backend_is_refused_by_the_name_of_the_parameter(url, options):
    with pytest.raises(
        ConfigurationError,
        match=r"^url must be a URL or an object, not|^url must be a URL or an object with the verbs of",
    ):
        connect(url, **options)


async def test_options_of_the_backend_are_passed_on():
    async with connect("memory://", tokens="counter") as locks, locks.lock("a") as lease:
        assert lease.token == 1


def test_a_thing_without_the_verbs_is_no_backend_and_the_error_lists_what_it_lacks():
    class Half:
        async def draw(self, claim, **options): ...

        async def give_back(self, claim, **options): ...

    with pytest.raises(ConfigurationError, match="Half lacks keep, end, tickets, names, listen, aclose, modes, rings"):
        LockClient(Half())


async def test_a_recording_is_made_where_the_environment_asks_for_one(monkeypatch, tmp_path):
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("FENCING_RECORD", str(path))
    async with connect("memory://") as locks, locks.lock("a") as lease:
        owner = lease.owner
    recorded = path.read_text()
    assert recorded.count("\n") == 3
    assert '"released"' in recorded
    assert owner not in recorded


# Open and closed


async def test_a_client_is_entered_and_left_by_different_tasks():
    locks = connect("memory://")
    await asyncio.create_task(locks.__aenter__())
    async with locks.lock("a") as lease:
        assert lease.held
    await asyncio.create_task(locks.__aexit__(None, None, None))
    with pytest.raises(UsageError):
        await locks.lock("a").acquire()


async def test_a_store_that_fails_does_not_replace_the_error_of_the_body():
    network = FaultyBackend(MemoryBackend())
    network.fail("release")

    async def work():
        async with LockClient(network) as locks:
            leases.append(await locks.lock("a").acquire())
            raise ValueError

    leases = []
    with pytest.raises(ValueError):
        await work()


async def test_closing_tells_those_who_hold_and_those_who_wait(stage):
    waiting = None

    async def hold():
        nonlocal waiting
        async with stage.lock():
            waiting = asyncio.create_task(stage.lock().acquire())
            await stage.heard("acquiring")
            await settle()
            await stage.client.aclose()

    with pytest.raises(LeaseLostError):
        await hold()
    with pytest.raises(UsageError, match="closed while it waited for lock 'a'"):
        await waiting


# Without asyncio


def without_asyncio(call):
    """Run *call* as trio would: a coroutine that is driven while no asyncio loop runs."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


NO_ASYNCIO = r"works on asyncio and uvloop, not on trio or curio \(with anyio: backend=\"asyncio\"\)"


def test_a_client_that_is_entered_without_asyncio_says_what_it_needs():
    client = connect("memory://")
    with pytest.raises(UsageError, match=NO_ASYNCIO):
        without_asyncio(client.__aenter__())
    assert repr(client).endswith("closed>")
    without_asyncio(client.aclose())


@pytest.mark.parametrize(
    "use",
    [
        lambda client, _: client.aclose(),
        lambda client, _: client.__aenter__(),
        lambda client, _: client.inspect("a"),
        lambda client, _: client.lock("b").acquire(),
        lambda client, _: client.lock("b").locked(),
        lambda client, _: client.lock("b").__aenter__(),
        lambda client, _: client.locking("b")(asyncio.sleep)(0),
        lambda _, lease: lease.release(),
        lambda _, lease: lease.renew(),
        lambda _, lease: lease.wait_lost(),
    ],
)
async def test_so_does_everything_of_an_open_client(use):
    async with connect("memory://") as client:
        lease = await client.lock("a").acquire()
        with pytest.raises(UsageError, match=NO_ASYNCIO):
            await asyncio.to_thread(lambda: without_asyncio(use(client, lease)))
        await lease.release()


# What its locks share


async def test_a_namespace_prefixes_the_stores_names_and_nobody_elses():
    store = MemoryBackend()
    async with LockClient(store, namespace="shop") as locks, LockClient(store) as others:
        async with locks.lock("seats") as lease:
            assert lease.name == "seats"
            assert (await locks.inspect("seats")).token == lease.token
            assert await holder(store, "seats") is None
            assert (await holder(store, "shop:seats")).token == lease.token
            async with others.lock("seats"):
                pass
            assert await others.lock("shop:seats").try_acquire() is None


async def test_errors_and_events_speak_of_the_users_name_without_the_namespace():
    events = []
    async with LockClient(MemoryBackend(), namespace="shop", observers=[events.append]) as locks:
        async with locks.lock("seats"):
            assert await locks.lock("seats").try_acquire() is None
    assert {event.name for event in events} == {"seats"}


async def test_inspecting_a_store_that_does_not_answer_is_an_error_and_not_a_free_lock(stage):
    stage.network.fail("inspect")
    with pytest.raises(BackendUnavailableError):
        await stage.client.inspect("a")


# One backend in two event loops.


async def in_another_loop(work):
    """Run the coroutine function *work* in the loop of a thread, while this loop runs."""
    return await asyncio.to_thread(lambda: asyncio.run(work()))


@pytest.mark.parametrize("make", [MemoryBackend, lambda: FaultyBackend(MemoryBackend()), "sqlite"])
async def test_a_backend_in_use_is_refused_to_another_loop(make, tmp_path):
    store = from_url(f"sqlite:///{tmp_path}/locks.db") if make == "sqlite" else make()

    async def use():
        async with LockClient(store) as locks, locks.lock("a"):
            return True

    async with LockClient(store) as first, LockClient(store) as second:
        for locks in (first, second):
            with pytest.raises(UsageError, match="in use in another event loop"):
                await in_another_loop(use)
            async with locks.lock("a", wait=0):
                pass
            await locks.aclose()
    assert await in_another_loop(use), "the clients of the first loop are closed"


@pytest.mark.parametrize("make", [MemoryBackend, lambda: FaultyBackend(MemoryBackend())])
async def test_the_calls_of_a_backend_in_memory_are_refused_to_another_loop(make):
    store, claim = make(), Claim("a", 60.0)
    await store.draw(claim)
    for call in (lambda: store.draw(claim), lambda: store.keep([(claim, 0)]), lambda: store.give_back(claim)):
        with pytest.raises(UsageError, match="in use in another event loop"):
            await in_another_loop(partial(_calling, call))
    await store.aclose()
    assert await in_another_loop(partial(_calling, lambda: store.give_back(claim))) is None


async def _calling(call):
    return await call()


async def test_a_backend_goes_from_a_loop_that_has_ended_to_the_next():
    store = MemoryBackend()

    async def leave_open():
        await LockClient(store).__aenter__()

    for _ in range(2):
        await in_another_loop(leave_open)
    async with LockClient(store) as locks, locks.lock("a"):
        pass


# Words


@pytest.mark.parametrize("world", [connect, sync.connect], ids=["tasks", "threads"])
@pytest.mark.parametrize(
    ("client", "hint"),
    [
        (redis.asyncio.Redis, "write connect(RedisBackend(client)), with RedisBackend from fencing_sdk.backends.redis"),
        (redis.Redis, "write connect(RedisBackend(client))"),
        (lambda: sqlite3.connect(":memory:"), "write connect('sqlite:///locks.db')"),
        (KazooClient, "write connect('zk://host:2181')"),
    ],
    ids=["redis.asyncio", "redis", "sqlite3", "kazoo"],
)
def test_a_client_of_a_driver_is_refused_with_what_to_write(world, client, hint):
    made = client()
    with pytest.raises(ConfigurationError, match=r"^url must be a URL or a backend, and \w+ is a client") as refused:
        world(made)
    assert hint in str(refused.value)
    if isinstance(made, sqlite3.Connection):
        made.close()


async def test_a_fence_is_named_like_the_lock_without_its_namespace():
    guard = MemoryGuard()
    async with connect("memory://?tokens=counter", namespace="shop") as locks, locks.lock("a", fences=[guard]) as lease:
        assert (await guard.highest("a"), await guard.highest("shop:a")) == (lease.token, None)
