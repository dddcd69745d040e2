"""Which server runs a script while slots move, addresses lie and servers stand still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from patience import until
from redis_cluster import Cluster
from redis_server import RedisServer

from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.connection.router import ClusterRouter
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["redis_fixtures"]

PATIENCE = 20.0


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


def lease(name: str) -> str:
    return f"{{fencing:{name}}}:l"


@pytest.fixture
async def backend(redis_cluster: Cluster) -> AsyncIterator[RedisBackend]:
    backend = from_url(url_of(redis_cluster))
    await backend.open()
    yield backend
    await backend.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def router(backend: RedisBackend) -> ClusterRouter:
    assert isinstance(backend._router, ClusterRouter)
    return backend._router


async def hold(backend: RedisBackend, *names: str) -> list[Claim]:
    claims = [Claim(name, 600) for name in names]
    for claim in claims:
        assert isinstance(await backend.acquire(claim), Grant)
    return claims


def names_at(cluster: Cluster, node: RedisServer, number: int) -> list[str]:
    found = (f"n{count}" for count in range(10_000))
    return [
        name for name, _ in zip((n for n in found if cluster.node_of(lease(n)) is node), range(number), strict=False)
    ]


def calls(node: RedisServer, command: str) -> int:
    for line in node.ask("INFO", "commandstats").splitlines():
        if line.startswith(f"cmdstat_{command}:calls="):
            return int(line.split("=")[1].split(",")[0]) + int(
                f"{line},".partition("rejected_calls=")[2].split(",")[0] or 0
            )
    return 0


async def test_an_address_that_leads_nowhere_costs_one_call_and_not_the_slot(backend, redis_cluster):
    slot = redis_cluster.slot_of(lease("a"))
    router(backend)._moved[slot] = "127.0.0.1:1"
    with pytest.raises(BackendUnavailableError):
        await backend.acquire(Claim("a", 60))
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                (claim,) = await hold(backend, "a")
                break
            except BackendUnavailableError:
                await asyncio.sleep(0.01)
    await backend.release(claim)
    assert "127.0.0.1:1" not in router(backend)._nodes


async def test_renewals_alone_find_the_new_master_of_a_slot(backend, redis_cluster):
    (claim,) = await hold(backend, "a")
    router(backend)._moved[redis_cluster.slot_of(lease("a"))] = "127.0.0.1:1"
    async with asyncio.timeout(PATIENCE):
        while await unanswered(backend, claim):  # noqa: ASYNC110  (a cluster tells of nothing)
            await asyncio.sleep(0.01)


async def unanswered(backend: RedisBackend, claim: Claim) -> bool:
    try:
        return await backend.renew([claim]) != [Renewal.RENEWED]
    except BackendUnavailableError:
        return True


async def test_servers_that_send_a_call_to_each_other_do_not_keep_it_for_ever(backend, redis_cluster):
    slot = redis_cluster.slot_of(lease("a"))
    here = redis_cluster.owner_of(slot)
    there = redis_cluster.other_than(here)
    ids = {node: node.ask("CLUSTER", "MYID") for node in (here, there)}
    try:
        here.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[there])
        before = calls(here, "evalsha") + calls(there, "evalsha")
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(BackendUnavailableError):
                await backend.acquire(Claim("a", 60))
        assert calls(here, "evalsha") + calls(there, "evalsha") - before <= 10
    finally:
        for node in redis_cluster.nodes:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[here])


async def test_a_slot_that_moved_is_asked_where_it_is_now(backend, redis_cluster):
    slot = redis_cluster.slot_of(lease("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    (claim,) = await hold(backend, "a")
    redis_cluster.move_slot(slot, to=target)
    for _ in range(3):
        assert await backend.renew([claim]) == [Renewal.RENEWED]
    await until(lambda: router(backend)._refreshing is None, what="the map is read")
    assert router(backend)._moved == {}
    before = calls(source, "evalsha")
    assert await backend.renew([claim]) == [Renewal.RENEWED]
    await backend.release(claim)
    assert calls(source, "evalsha") == before


async def test_what_a_server_said_counts_before_the_map_is_read_anew(backend, redis_cluster, monkeypatch):
    slot = redis_cluster.slot_of(lease("a"))
    source = redis_cluster.owner_of(slot)
    (claim,) = await hold(backend, "a")
    monkeypatch.setattr(router(backend), "_refresh_soon", lambda: None)
    redis_cluster.move_slot(slot, to=redis_cluster.other_than(source))
    assert await backend.renew([claim]) == [Renewal.RENEWED]
    before = calls(source, "evalsha")
    assert await backend.renew([claim]) == [Renewal.RENEWED]
    assert calls(source, "evalsha") == before


async def test_many_slots_that_moved_are_asked_at_once(backend, redis_cluster, monkeypatch):
    """One after the other, a thousand leases behind a slow link would be lost before the last was asked for."""
    monkeypatch.setattr(backend._losses, "_check_soon", lambda _: None)  # else a look at what moved may be there first
    source = redis_cluster.nodes[0]
    target = redis_cluster.other_than(source)
    names = names_at(redis_cluster, source, 30)
    claims = await hold(backend, *names)
    for name in names:
        redis_cluster.start_move(redis_cluster.slot_of(lease(name)), to=target)
        redis_cluster.move_keys(redis_cluster.slot_of(lease(name)), to=target)
    for state in ("asked for", "moved"):
        running = most = 0
        run = router(backend).run

        async def watched(call, run=run):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await run(call)
            finally:
                running -= 1

        router(backend).run = watched
        assert await backend.renew(claims) == [Renewal.RENEWED] * 30, state
        router(backend).run = run
        assert most >= 30, state
        for name in names if state == "asked for" else ():
            redis_cluster.finish_move(redis_cluster.slot_of(lease(name)), to=target)
    for claim in claims:
        await backend.release(claim)


async def test_a_server_that_stands_still_takes_no_answers_of_others_along(backend, redis_cluster):
    frozen, living = redis_cluster.nodes[:2]
    claims = await hold(backend, names_at(redis_cluster, frozen, 1)[0], names_at(redis_cluster, living, 1)[0])
    frozen.pause()
    renewal = asyncio.create_task(backend.renew(claims))
    before = calls(living, "evalsha")
    await until(lambda: calls(living, "evalsha") > before, what="the other has answered")
    await asyncio.sleep(0.05)
    renewal.cancel()
    assert await renewal == [Renewal.UNKNOWN, Renewal.RENEWED]
    frozen.resume()


async def test_a_renewal_that_nobody_answers_can_be_cancelled(backend, redis_cluster):
    claims = await hold(backend, *(f"n{number}" for number in range(10)))
    for node in redis_cluster.nodes:
        node.pause()
    renewal = asyncio.create_task(backend.renew(claims))
    await asyncio.sleep(0.01)
    renewal.cancel()
    await asyncio.wait((renewal,))
    assert renewal.cancelled()
    for node in redis_cluster.nodes:
        node.resume()


async def test_a_server_that_is_gone_stops_no_other(backend, redis_cluster):
    dead, living = redis_cluster.nodes[:2]
    claims = await hold(backend, names_at(redis_cluster, dead, 1)[0], names_at(redis_cluster, living, 1)[0])
    dead.kill()
    assert await backend.renew(claims) == [Renewal.UNKNOWN, Renewal.RENEWED]
    assert await backend.renew(claims) == [Renewal.UNKNOWN, Renewal.RENEWED]
    with pytest.raises(BackendUnavailableError):
        await backend.renew(claims[:1])


async def test_who_waits_for_the_map_is_cancelled_and_not_told_of_an_error(redis_cluster):
    backend = from_url(url_of(redis_cluster))
    redis_cluster.nodes[0].pause()
    waiter = asyncio.create_task(backend.acquire(Claim("a", 60)))
    await until(lambda: router(backend)._refreshing is not None, what="the map is asked for")
    reading = router(backend)._refreshing
    reading.add_done_callback(lambda _: waiter.cancel())
    reading.cancel()
    await asyncio.wait((waiter,))
    assert waiter.cancelled()
    redis_cluster.nodes[0].resume()
    await backend.aclose()


async def test_closing_while_the_map_is_read_tells_who_waits(redis_cluster):
    backend = from_url(url_of(redis_cluster))
    redis_cluster.nodes[0].pause()
    waiter = asyncio.create_task(backend.acquire(Claim("a", 60)))
    await until(lambda: router(backend)._refreshing is not None, what="the map is asked for")
    reading = router(backend)._refreshing
    await backend.aclose()
    assert reading.cancelled()
    with pytest.raises(BackendUnavailableError):
        await waiter
    redis_cluster.nodes[0].resume()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_map_is_read_once_however_many_ask(redis_cluster):
    backend = from_url(url_of(redis_cluster))
    seed = redis_cluster.nodes[0]
    before = calls(seed, "cluster") + calls(seed, "cluster|slots")
    await asyncio.gather(*(backend.inspect(f"n{number}") for number in range(50)))
    assert calls(seed, "cluster") + calls(seed, "cluster|slots") - before == 1
    await backend.aclose()


async def test_the_servers_that_left_the_cluster_are_let_go(backend, redis_cluster):
    names = names_at(redis_cluster, redis_cluster.nodes[0], 1)
    (claim,) = await hold(backend, *names)
    stranger = router(backend)._node_at("127.0.0.1:1")
    assert stranger in router(backend).nodes()
    await router(backend)._refresh_soon()
    assert stranger not in router(backend).nodes()
    assert len(router(backend).nodes()) <= 3
    assert await backend.renew([claim]) == [Renewal.RENEWED]
