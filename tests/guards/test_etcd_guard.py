"""EtcdGuard: the contract, and what one transaction with the comparison in front promises."""

import asyncio
from base64 import b64decode
from contextlib import asynccontextmanager

import pytest
from etcd_server import b64
from etcd_stage import ask_first
from patience import until

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    StaleTokenError,
    Token,
    connect,
)
from fencing_sdk.backends.etcd import from_url
from fencing_sdk.guards.etcd import EtcdGuard, delete, put
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["etcd_fixtures"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


def value(server, key):
    found = server.ask("kv/range", {"key": b64(key)}).get("kvs", [])
    return b64decode(found[0].get("value", "")).decode() if found else None


class EtcdSuite(GuardSuite):
    several = True

    @pytest.fixture
    async def guard(self, etcd_server):
        self.server = etcd_server
        async with self.opened() as guard:
            yield guard

    @asynccontextmanager
    async def opened(self):
        async with EtcdGuard(self.server.url) as guard:
            yield guard

    async def write_all(self, guard, tokens, values):
        await guard.execute_all(tokens, *(put(f"data/{name}", value) for name, value in values.items()))

    async def read(self, guard, resource):
        return value(self.server, f"data/{resource}")

    def reopen(self, guard):
        return self.opened()


class TestOperations(EtcdSuite):
    async def write(self, guard, resource, token, value):
        await guard.execute(resource, token, put(f"data/{resource}", value))


@pytest.fixture
async def guard(etcd_server):
    async with EtcdGuard(etcd_server.url) as guard:
        yield guard


# The comparison in a transaction of the caller's own


async def own_transaction(server, comparison, text):
    body = {"compare": [comparison], "success": [{"request_put": {"key": b64("own"), "value": b64(text)}}]}
    return (await server.command("kv/txn", body)).get("succeeded", False)


async def test_the_comparison_holds_from_the_raise_to_the_next_raise(etcd_server, guard):
    comparison = guard.comparison("a", OLD)
    assert not await own_transaction(etcd_server, comparison, "too early")
    await guard.raise_to("a", OLD)
    assert await own_transaction(etcd_server, comparison, "old")
    await guard.raise_to("a", NEW)
    assert not await own_transaction(etcd_server, comparison, "stale")
    assert value(etcd_server, "own") == "old"
    assert await own_transaction(etcd_server, guard.comparison("a", NEW), "new")


async def test_a_lock_raises_the_fence_and_its_comparison_fails_once_the_next_holder_came(etcd_server, guard):
    async with connect(etcd_server.url) as locks:
        zombie = await locks.lock("a", fences=[guard]).acquire()
        stale = guard.comparison("a", zombie.token)
        assert await own_transaction(etcd_server, stale, "in time")
        await asyncio.to_thread(etcd_server.delete, "fencing/")
        async with locks.lock("a", fences=[guard]) as lease:
            assert not await own_transaction(etcd_server, stale, "late")
            assert await own_transaction(etcd_server, guard.comparison("a", lease.token), "fresh")
    assert value(etcd_server, "own") == "fresh"


async def test_the_comparison_of_the_lock_itself_needs_no_fence(etcd_server):
    """In the etcd of the lock, the create revision of the holder's key says the same."""
    backend = from_url(etcd_server.url)
    async with connect(backend) as locks:
        zombie = await locks.lock("a").acquire()
        stale = backend.comparison("a", zombie.owner, zombie.token)
        assert await own_transaction(etcd_server, stale, "in time")
        await asyncio.to_thread(etcd_server.delete, "fencing/")
        assert not await own_transaction(etcd_server, stale, "late")
        async with locks.lock("a") as lease:
            assert not await own_transaction(etcd_server, stale, "late")
            assert await own_transaction(etcd_server, backend.comparison("a", lease.owner, lease.token), "fresh")


# One step


async def test_operations_and_comparisons_of_the_caller_are_one_step_with_the_check(etcd_server, guard):
    answers = await guard.execute("a", OLD, put("x", "1"), put(b"y", b"\xff"), delete("z"))
    assert len(answers) == 3
    own = {"key": b64("x"), "target": "VALUE", "result": "EQUAL", "value": b64("1")}
    assert await guard.execute("a", OLD, put("x", "2"), compare=[own]) is not None
    assert await guard.execute("a", OLD, put("x", "3"), compare=[own]) is None
    assert value(etcd_server, "x") == "2"
    with pytest.raises(StaleTokenError):
        await guard.execute("a", 32, put("x", "4"))
    assert value(etcd_server, "x") == "2"


async def test_a_comparison_that_fails_does_not_raise_the_fence(guard):
    own = {"key": b64("x"), "target": "VERSION", "result": "EQUAL", "version": "7"}
    assert await guard.execute("a", OLD, put("x", "1"), compare=[own]) is None
    assert await guard.highest("a") is None


async def test_a_fence_raised_by_another_process_refuses_what_this_one_remembers_as_current(etcd_server, guard):
    await guard.execute("a", OLD, put("x", "old"))
    async with EtcdGuard(etcd_server.url) as other:
        await other.raise_to("a", NEW)
    with pytest.raises(StaleTokenError) as refused:
        await guard.execute("a", OLD, put("x", "stale"))
    assert refused.value.fence == 34
    assert value(etcd_server, "x") == "old"


async def test_a_current_holder_pays_one_request_for_a_write(etcd_server, guard):
    await guard.execute("a", OLD, put("x", "0"))
    before = etcd_server.calls("Txn"), etcd_server.calls("Range")
    for number in range(5):
        await guard.execute("a", OLD, put("x", str(number)))
    assert (etcd_server.calls("Txn"), etcd_server.calls("Range")) == (before[0] + 5, before[1])


async def test_a_write_whose_answer_was_lost_is_not_sent_again(etcd_server, etcd_proxy):
    url = f"etcd://127.0.0.1:{etcd_proxy.port},127.0.0.1:{etcd_server.members[0].port}"
    async with EtcdGuard(url) as guard:
        await guard.raise_to("a", OLD)
        ask_first(guard._gateway, etcd_proxy.port)
        before = etcd_server.calls("Txn")
        etcd_proxy.half_open()
        writing = asyncio.create_task(guard.execute("a", OLD, put("x", "1")))
        await until(lambda: value(etcd_server, "x") == "1", what="the write arrives")
        etcd_proxy.cut()
        with pytest.raises(BackendUnavailableError):
            await writing
        assert etcd_server.calls("Txn") == before + 1
        etcd_proxy.heal()


async def test_a_member_that_is_down_is_followed_by_the_next(etcd_server):
    async with EtcdGuard(f"etcd://127.0.0.1:1,127.0.0.1:{etcd_server.members[0].port}") as guard:
        await guard.raise_to("a", OLD)
        await guard.execute("a", OLD, put("x", "1"))
    assert value(etcd_server, "x") == "1"


async def test_the_fence_is_readable_and_what_is_none_is_refused(etcd_server, guard):
    await guard.raise_to("seats/42", NEW)
    assert guard.fence_key("seats/42") == "fence/seats%2F42"
    assert value(etcd_server, "fence/seats%2F42") == '34;holder="bbbbbbbb"'
    for foreign in ("thirty", '33; holder="aa"', "33;ttl=5", "033"):
        await etcd_server.command("kv/put", {"key": b64("fence/b"), "value": b64(foreign)})
        for call in (guard.raise_to("b", NEW), guard.highest("b")):
            with pytest.raises(BackendRefusedError, match="is not a fence"):
                await call
        assert value(etcd_server, "fence/b") == foreign


@pytest.mark.parametrize("operation", [lambda: put(5, "a"), lambda: put("a", 5), lambda: delete(None)])
def test_what_is_neither_text_nor_bytes_is_refused(operation):
    with pytest.raises(ConfigurationError, match=r"must be a str or bytes"):
        operation()
