"""Which server is dialled, and which runs a script while slots move, addresses lie and servers stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
import redis.asyncio.sentinel
import redis.exceptions
from local_ports import HOST, free_port
from patience import until
from redis_cluster import Cluster
from redis_links import PATIENCE, Ears, ask, dialer, dialled, servers, until_nobody_is_connected
from redis_sentinels import Sentinels
from redis_server import RedisServer

from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.connection.dial import UnreachableError, first_answer
from fencing_sdk.backends.redis.connection.router import SLOTS, ClusterRouter, SlotMap
from fencing_sdk.backends.redis.options import servers_of_client
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

pytest_plugins = ["redis_fixtures"]


# Which server is dialled: the master that Sentinels name, the owner that a cluster names, and nobody else.


def hosts(servers: list[RedisServer]) -> str:
    return ",".join(f"{HOST}:{server.port}" for server in servers)


def dead() -> str:
    return f"{HOST}:{free_port()}"


# Sentinels


def sentinel_url(group: Sentinels, *, more: str = "") -> str:
    return f"redis+sentinel://{more}{hosts(group.sentinels)}/{group.name}"


async def test_a_master_that_was_demoted_behind_the_sentinels_back_is_refused(start_redis):
    """A Sentinel that is not up to date still names it."""
    other, demoted = start_redis(), start_redis()
    with lone_sentinel(demoted) as sentinel:
        url = f"redis+sentinel://{HOST}:{sentinel.port}/alone"
        async with dialled(url):
            pass
        await demoted.command("REPLICAOF", HOST, other.port)
        with pytest.raises(redis.exceptions.ReadOnlyError):
            await dialer(url).dial(Ears())


class _Sentinel(RedisServer):
    mode = "--sentinel"

    def defaults(self) -> dict[str, str]:
        return {}


@contextlib.contextmanager
def lone_sentinel(master: RedisServer, *, patience: int = 60_000, **settings: str) -> Iterator[RedisServer]:
    watch = [f"monitor alone {HOST} {master.port} 1", f"down-after-milliseconds alone {patience}"]
    with _Sentinel(sentinel=watch, **settings) as sentinel:
        yield sentinel


async def test_a_master_that_is_known_to_be_down_is_none(start_redis):
    master = start_redis()
    with lone_sentinel(master, patience=200) as sentinel:
        master.kill()
        async with asyncio.timeout(PATIENCE):
            while "s_down" not in str(await sentinel.command("SENTINEL", "MASTER", "alone")):  # noqa: ASYNC110  (a server)
                await asyncio.sleep(0.01)
        with pytest.raises(redis.asyncio.sentinel.MasterNotFoundError):
            await dialer(f"redis+sentinel://{HOST}:{sentinel.port}/alone").dial(Ears())


async def test_sentinels_have_a_login_of_their_own(start_redis):
    master = start_redis(requirepass="data")
    with lone_sentinel(master, requirepass="dog") as sentinel:
        url = f"redis+sentinel://:data@{HOST}:{sentinel.port}/alone"
        async with dialled(f"{url}?sentinel_password=dog") as (link, ears):
            assert await ask(link, ears, "PING") == b"PONG"
        with pytest.raises(redis.exceptions.AuthenticationError):
            await dialer(f"{url}?sentinel_password=cat").dial(Ears())
        with pytest.raises(redis.exceptions.AuthenticationError):
            await dialer(f"{url}?sentinel_password=dog".replace(":data@", ":lost@")).dial(Ears())


async def test_a_sentinel_that_knows_too_few_others_does_not_count(redis_sentinels):
    for peers, counts in ((2, True), (3, False)):
        manager = redis.asyncio.sentinel.Sentinel(redis_sentinels.addresses, min_other_sentinels=peers)
        place = servers_of_client(manager.master_for(redis_sentinels.name))
        if counts:
            async with dialled(place):
                pass
        else:
            with pytest.raises(redis.asyncio.sentinel.MasterNotFoundError):
                await place.dial(Ears())


async def test_sentinels_that_are_not_reached_are_all_told_with_the_reason():
    one, other = sorted([dead(), dead()])
    with pytest.raises(UnreachableError) as unreachable:
        await dialer(f"redis+sentinel://:hunter2@{other},{one},no-such-host.invalid/service").dial(Ears())
    assert str(unreachable.value).startswith(
        f"no connection to {one} (Connection refused), {other} (Connection refused), no-such-host.invalid:26379 ("
    )
    assert "hunter2" not in str(unreachable.value)


async def test_a_master_that_is_not_where_the_sentinels_say_is_told_so(start_redis):
    master = start_redis()
    with lone_sentinel(master) as sentinel:
        master.kill()
        with pytest.raises(UnreachableError) as unreachable:
            await dialer(f"redis+sentinel://{HOST}:{sentinel.port}/alone").dial(Ears())
    assert str(unreachable.value) == (
        f"no connection to {HOST}:{master.port} (Connection refused), the master's address by the Sentinels"
    )


async def test_a_certificate_that_is_not_made_for_what_the_sentinels_announce_is_told_so(start_redis, certificates):
    """Mostly they announce an IP address, and the certificate is made for a name."""
    master = start_redis(tls=certificates)
    await master.command("CONFIG", "SET", "bind", f"{HOST} 127.0.0.2")
    with _Sentinel(sentinel=[f"monitor alone 127.0.0.2 {master.tls_port} 1"]) as sentinel:
        manager = redis.asyncio.sentinel.Sentinel(
            [(HOST, sentinel.port)], ssl=True, ssl_ca_certs=str(certificates.authority)
        )
        with pytest.raises(BackendRefusedError) as refused:
            await servers_of_client(manager.master_for("alone")).dial(Ears())
    heard = f"the certificate is not made for 127.0.0.2:{master.tls_port}, the master's address by the Sentinels; "
    assert heard in str(refused.value)
    assert "announce-hostnames" in str(refused.value)


async def test_a_server_in_the_place_of_a_sentinel_and_the_other_way_round_are_refused(redis_server, redis_sentinels):
    with pytest.raises(BackendRefusedError, match="not a Sentinel"):
        await dialer(f"redis+sentinel://{HOST}:{redis_server.port}/service").dial(Ears())
    with pytest.raises(BackendRefusedError, match=r"redis\+sentinel"):
        await dialer(redis_sentinels.sentinels[0].url).dial(Ears())


async def test_sentinels_that_are_dead_or_silent_are_passed_over(redis_sentinels):
    url = sentinel_url(redis_sentinels, more=f"{dead()},{dead()},{dead()},") + "?socket_connect_timeout=60"
    master = redis_sentinels.master
    redis_sentinels.sentinels[0].pause()
    async with asyncio.timeout(PATIENCE), dialled(url) as (link, _):  # the silent one alone would cost a minute
        assert link.address == f"{HOST}:{master.port}"


# Clusters


def slot_map(url: str) -> SlotMap:
    place = servers(url)
    assert isinstance(place, SlotMap)
    return place


def cluster_map(cluster: Cluster, *, more: str = "") -> SlotMap:
    return slot_map(f"redis+cluster://{more}{HOST}:{cluster.nodes[0].port}?socket_connect_timeout=60")


def owner(cluster: Cluster, slot: int) -> str:
    return f"{HOST}:{cluster.owner_of(slot).port}"


async def test_seeds_that_are_dead_or_silent_are_passed_over(redis_cluster):
    redis_cluster.nodes[2].pause()
    slots = cluster_map(redis_cluster, more=f"{dead()},{dead()},{HOST}:{redis_cluster.nodes[2].port},")
    async with asyncio.timeout(PATIENCE):  # the silent one alone would cost a minute
        await slots.refresh()
    assert slots.address(0) == owner(redis_cluster, 0)


async def test_a_map_can_be_read_although_every_seed_has_gone(redis_cluster):
    slots = cluster_map(redis_cluster)
    await slots.refresh()
    redis_cluster.nodes[0].kill()
    await slots.refresh()
    assert slots.address(SLOTS - 1) == owner(redis_cluster, SLOTS - 1)


async def one_node(start_redis, slots: range, **settings) -> RedisServer:
    server = start_redis(cluster_enabled=True, **settings)
    await server.command("CLUSTER", "ADDSLOTS", *slots)
    return server


async def test_nodes_have_tls_as_the_url_says(start_redis, certificates):
    server = await one_node(start_redis, range(SLOTS), tls=certificates, tls_cluster=True, tls_replication=True)
    slots = slot_map(f"rediss+cluster://localhost:{server.tls_port}?ssl_ca_certs={certificates.authority}")
    await slots.refresh()
    assert slots.address(0) == f"localhost:{server.tls_port}"  # a node that never met another tells no host
    async with dialled(slots.dialer(slots.address(0))) as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


@pytest.mark.parametrize(
    ("kind", "hostname", "host"),
    [
        ("ip", "", HOST),
        ("hostname", "localhost", "localhost"),
        ("hostname", "", HOST),
        ("unknown-endpoint", "", "localhost"),
    ],
)
async def test_nodes_are_reached_by_the_name_they_announce(start_redis, kind, hostname, host):
    """The last two: by the address they have where there is no name, and by the host that was asked."""
    server = await one_node(start_redis, range(SLOTS), cluster_announce_ip=HOST)
    await server.command("CONFIG", "SET", "cluster-announce-hostname", hostname)
    await server.command("CONFIG", "SET", "cluster-preferred-endpoint-type", kind)
    slots = slot_map(f"redis+cluster://localhost:{server.port}")
    await slots.refresh()
    assert slots.address(5) == f"{host}:{server.port}"
    async with dialled(slots.dialer(slots.address(5))) as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


async def test_a_server_that_is_no_node_is_refused(redis_server):
    with pytest.raises(BackendRefusedError, match="redis://"):
        await slot_map(f"redis+cluster://{HOST}:{redis_server.port}").refresh()
    await until_nobody_is_connected(redis_server)


async def test_a_node_that_is_not_where_the_cluster_says_is_told_so():
    slots = servers(f"redis+cluster://:hunter2@{dead()}")
    assert isinstance(slots, SlotMap)
    node = dead()
    with pytest.raises(UnreachableError) as unreachable:
        await slots.dialer(node).dial(Ears())
    assert str(unreachable.value) == (f"no connection to {node} (Connection refused), a node's address by the cluster")


# Asking several at once


async def test_the_first_answer_counts_and_the_others_are_cancelled():
    cancelled, started = [], []

    async def slow(number: int) -> int:
        started.append(number)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.append(number)
        return number

    async def broken() -> int:
        raise redis.exceptions.ConnectionError

    async def quick() -> int:
        return 7

    assert await first_answer([broken, lambda: slow(1), broken, broken, lambda: slow(2), quick, lambda: slow(3)]) == 7
    assert sorted(cancelled) == sorted(started)
    assert 3 not in started


async def test_what_a_server_says_is_told_rather_than_that_another_is_down():
    async def down() -> int:
        raise UnreachableError("here")

    async def wrong() -> int:
        raise redis.exceptions.AuthenticationError

    for questions in ([down, wrong, down, down, down], [wrong, down], [down, down, down, down, wrong]):
        with pytest.raises(redis.exceptions.AuthenticationError):
            await first_answer(questions)


# Which server runs a script while slots move, addresses lie and servers stand still.


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


def lease(name: str) -> str:
    return f"{{fencing:{name}}}:s"


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
        assert (await backend.draw(claim)).token is not None
    return claims


async def kept(backend: RedisBackend, *claims: Claim) -> list[bool | None]:
    """Keep tickets; None: not answered."""
    answers = await backend.keep([(claim, 0) for claim in claims])
    return [None if answer is None else isinstance(answer, Place) for answer in answers]


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
        await backend.draw(Claim("a", 60))
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                (claim,) = await hold(backend, "a")
                break
            except BackendUnavailableError:
                await asyncio.sleep(0.01)
    await backend.give_back(claim)
    assert "127.0.0.1:1" not in router(backend)._nodes


async def test_renewals_alone_find_the_new_master_of_a_slot(backend, redis_cluster):
    (claim,) = await hold(backend, "a")
    router(backend)._moved[redis_cluster.slot_of(lease("a"))] = "127.0.0.1:1"
    async with asyncio.timeout(PATIENCE):
        while await unanswered(backend, claim):  # noqa: ASYNC110  (a cluster tells of nothing)
            await asyncio.sleep(0.01)


async def unanswered(backend: RedisBackend, claim: Claim) -> bool:
    try:
        return await kept(backend, claim) != [True]
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
                await backend.draw(Claim("a", 60))
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
        assert await kept(backend, claim) == [True]
    await until(lambda: not router(backend)._moved, what="the map is read")
    before = calls(source, "evalsha")
    assert await kept(backend, claim) == [True]
    await backend.give_back(claim)
    assert calls(source, "evalsha") == before


async def test_many_slots_that_moved_are_asked_at_once(backend, redis_cluster):
    """One after the other, a thousand leases behind a slow link would be lost before the last was asked for."""
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
        assert await kept(backend, *claims) == [True] * 30, state
        router(backend).run = run
        assert most >= 30, state
        for name in names if state == "asked for" else ():
            redis_cluster.finish_move(redis_cluster.slot_of(lease(name)), to=target)
    for claim in claims:
        await backend.give_back(claim)


async def test_a_server_that_stands_still_takes_no_answers_of_others_along(backend, redis_cluster):
    frozen, living = redis_cluster.nodes[:2]
    claims = await hold(backend, names_at(redis_cluster, frozen, 1)[0], names_at(redis_cluster, living, 1)[0])
    frozen.pause()
    renewal = asyncio.create_task(kept(backend, *claims))
    before = calls(living, "evalsha")
    await until(lambda: calls(living, "evalsha") > before, what="the other has answered")
    await asyncio.sleep(0.05)
    renewal.cancel()
    assert await renewal == [None, True]
    frozen.resume()


async def test_who_waits_for_the_map_is_cancelled_and_not_told_of_an_error(redis_cluster):
    backend = from_url(url_of(redis_cluster))
    redis_cluster.nodes[0].pause()
    waiter = asyncio.create_task(backend.draw(Claim("a", 60)))
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
    waiter = asyncio.create_task(backend.draw(Claim("a", 60)))
    await until(lambda: router(backend)._refreshing is not None, what="the map is asked for")
    reading = router(backend)._refreshing
    await backend.aclose()
    assert reading.cancelled()
    with pytest.raises(BackendUnavailableError):
        await waiter
    redis_cluster.nodes[0].resume()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_servers_that_left_the_cluster_are_let_go(backend, redis_cluster):
    names = names_at(redis_cluster, redis_cluster.nodes[0], 1)
    (claim,) = await hold(backend, *names)
    stranger = router(backend)._node_at("127.0.0.1:1")
    assert stranger in router(backend)._nodes.values()
    await router(backend)._refresh_soon()
    assert stranger not in router(backend)._nodes.values()
    assert len(router(backend)._nodes.values()) <= 3
    assert await kept(backend, claim) == [True]
