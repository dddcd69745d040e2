"""An attempt to take a lock in etcd goes on while its claim joins the line: neither undoes the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from etcd_server import EtcdCluster
from etcd_stage import count_of_keys, granted, keys
from patience import until

from fencing_sdk._etcd.json_codec import encoded
from fencing_sdk.abc import Claim, Held, Renewal
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["etcd_fixtures"]


async def test_a_grant_that_comes_before_the_answer_to_joining_is_kept_when_the_line_is_left(etcd: EtcdBackend):
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    stand, stood = etcd._requests.join_line, asyncio.Event()

    async def answered_late(*arguments: Any) -> Any:
        await stand(*arguments)
        stood.set()
        await asyncio.Event().wait()

    etcd._requests.join_line = answered_late
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await stood.wait()
    await etcd.release(holder)
    token = await granted(etcd, claim)
    joining.cancel()
    await asyncio.wait((joining,))
    found = await etcd.inspect("a")
    assert found is not None
    assert found.token == token


async def test_nothing_is_granted_while_the_own_key_is_being_deleted(etcd: EtcdBackend):
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    requests, free, deleting = etcd._requests, asyncio.Event(), asyncio.Event()
    take, stand = requests.take, requests.join_line

    async def taken_later(*arguments: Any) -> Any:
        await free.wait()
        return await take(*arguments)

    async def lost(*arguments: Any) -> Any:
        await stand(*arguments)
        raise BackendUnavailableError("EtcdBackend", "queue", "the answer was lost")

    async def deleted_later(*_: Any) -> None:
        deleting.set()
        await asyncio.Event().wait()

    requests.take, requests.join_line = taken_later, lost
    asking = asyncio.create_task(etcd.acquire(claim))
    await asyncio.sleep(0.05)
    await etcd.release(holder)
    requests.delete = deleted_later
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await deleting.wait()
    free.set()
    with pytest.raises(BackendUnavailableError):
        await asking
    await asyncio.wait((joining,))


@pytest.mark.parametrize("held_back", ["turn", "join_line"])
async def test_a_try_that_goes_on_while_its_claim_leaves_the_line_puts_no_key_again(
    etcd: EtcdBackend, etcd_server: EtcdCluster, held_back: str
):
    """A client that closes leaves its lines while tries are under way: they find the key gone, and joined again."""
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    asked, free = asyncio.Event(), asyncio.Event()
    call = getattr(etcd._requests, held_back)

    async def delivered_late(*arguments: Any) -> Any:
        asked.set()
        await free.wait()
        return await call(*arguments)

    async with etcd.queue(claim):
        setattr(etcd._requests, held_back, delivered_late)
        if held_back == "join_line":
            etcd_server.ask("kv/deleterange", {"key": encoded(etcd._keys.own(claim))})
        trying = asyncio.create_task(etcd.acquire(claim))
        await asked.wait()
    revision = etcd._requests.highest_revision
    free.set()
    assert isinstance(await trying, Held)
    assert len(await keys(etcd_server, "a")) == 1
    if held_back == "turn":
        assert etcd._requests.highest_revision == revision, "it was not even put"


def delivered_late(call: Any, free: asyncio.Event, sent: list[asyncio.Task[Any]]) -> Any:
    """*call* as requests that are carried out once *free* is set, although their callers have given up."""

    async def deliver(*arguments: Any) -> Any:
        await free.wait()
        return await call(*arguments)

    async def send(*arguments: Any) -> Any:
        sent.append(asyncio.create_task(deliver(*arguments)))
        return await asyncio.shield(sent[-1])

    return send


async def stay_in_line(backend: EtcdBackend, claim: Claim) -> None:
    async with backend.queue(claim):
        await asyncio.Event().wait()


async def test_a_joining_that_arrives_after_its_waiter_was_cancelled_leaves_no_place_in_the_line(
    etcd: EtcdBackend, etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """A busy etcd may carry out a request that was given up after the deletion: all behind it would wait for a ttl."""
    for limit in ("_JOINING", "_LEAVING"):  # the answer comes soon, unless the machine stands still
        monkeypatch.setattr(f"fencing_sdk.backends.etcd.{limit}", 60.0)
    holder, claim = Claim("a", 60.0), Claim("a", 60.0)
    await granted(etcd, holder)
    join, free = etcd._requests.join_line, asyncio.Event()
    late: list[asyncio.Task[Any]] = []
    etcd._requests.join_line = delivered_late(join, free, late)
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await until(lambda: late, what="the request is sent")
    joining.cancel()
    await asyncio.wait((joining,), timeout=0.3)  # long enough for a deletion that does not wait
    free.set()
    await asyncio.wait((joining, *late))
    assert len(await keys(etcd_server, "a")) == 1


async def test_an_attempt_beside_an_answered_joining_is_deleted_when_it_arrives_long_after_the_release(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """That joining was answered says nothing of the attempt; another lock keeps the lease of the late key alive."""
    holder, claim, kept = Claim("a", 60.0), Claim("a", 60.0), Claim("kept", 60.0)
    await granted(etcd, kept)
    await granted(etcd, holder)
    take, stand, free, stood = etcd._requests.take, etcd._requests.join_line, asyncio.Event(), asyncio.Event()
    late: list[asyncio.Task[Any]] = []

    async def answered_late(*arguments: Any) -> Any:
        standing = await stand(*arguments)
        await stood.wait()
        return standing

    etcd._requests.take, etcd._requests.join_line = delivered_late(take, free, late), answered_late
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await count_of_keys(etcd_server, "a", 2)
    asking = asyncio.create_task(etcd.acquire(claim))
    await until(lambda: late, what="the attempt is sent")
    stood.set()
    await until(lambda: etcd._waiters.find(claim), what="joining is answered")
    for task in (asking, joining):
        task.cancel()
        await asyncio.wait((task,))
    await etcd.release(claim)
    await etcd.release(holder)
    await count_of_keys(etcd_server, "a", 0)
    free.set()
    await asyncio.wait(late)
    await count_of_keys(etcd_server, "a", 1)
    async with asyncio.timeout(20):
        while await keys(etcd_server, "a"):
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            await asyncio.sleep(0.05)
