"""Clusters of etcd: members that die, are cut off, have wrong clocks, or refuse what is asked."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest
from campaigns import amount
from etcd_network import PeerNetwork
from etcd_server import EtcdCluster, EtcdError, EtcdMember, StartEtcd, b64, gone
from etcd_stage import (
    SHORT_IN_LINE,
    ask_first,
    backend_on,
    count_of_keys,
    granted,
    held_for,
    in_order,
    kept,
    six_in_line,
)
from event_log import ENDED_BY_TIME
from serving import serving
from stays import Stay, answered, eventually, opened, staying
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk import StaleTokenError
from fencing_sdk.abc import Claim
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError
from fencing_sdk.events import Renewed
from fencing_sdk.guards.etcd import EtcdGuard, put

pytest_plugins = ["etcd_fixtures"]


# A cluster of three etcd members that loses its leader, its majority and single members.


KEPT = amount({"ttl": 8.0}, short={"ttl": 20.0, "heartbeat_interval": 0.5})
BEYOND = amount(9.0, short=2.0)
"""Seconds for which a lease is kept: in a campaign longer than the ttl, so that no grant from before is left."""


@pytest.mark.campaign
async def test_a_leader_that_is_killed_costs_no_lease_and_no_exclusion(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, log), staying(locks.lock("a", **KEPT)) as stay:
        leader = await etcd_cluster.await_leader()
        leader.kill()
        await held_for(BEYOND, log, locks, "a")
        await stay.end()
        async with locks.lock("a", wait=20) as lease:
            assert lease.token > stay.token
    await gone(etcd_cluster, "fencing/")


async def test_a_leader_that_is_killed_while_some_wait_loses_no_wake_up_and_no_order(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, _), opened(etcd_cluster.url) as (others, _):
        async with staying(locks.lock("a", ttl=20)) as first:
            stays = await six_in_line(etcd_cluster, "a", locks, others)
            (await etcd_cluster.await_leader()).kill()
            await first.end()
            await in_order(stays)


async def test_without_a_majority_the_work_ends_in_time_and_nobody_else_begins(etcd_cluster: EtcdCluster):
    """Two of three stand still. When they go on, the lock is free for a higher token."""
    async with opened(etcd_cluster.url) as (locks, _), opened(etcd_cluster.url) as (others, _):
        async with staying(locks.lock("a", **SHORT_IN_LINE)) as stay:
            waiting = Stay(others.lock("a", ttl=20))
            await count_of_keys(etcd_cluster, "a", 2)
            for member in etcd_cluster.members[:2]:
                member.pause()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert not waiting.entered.is_set()
            for member in etcd_cluster.members[:2]:
                member.resume()
            if waiting.task.done():  # the store was silent for as long as it waits for an answer
                waiting = Stay(others.lock("a", ttl=20))
            await waiting.begun()
            assert waiting.granted_at > stay.body_ended_at
            assert waiting.token > stay.token
            await waiting.end()


async def test_a_member_that_hangs_is_left_for_another_long_before_an_interval_is_over(etcd_cluster: EtcdCluster):
    """The first that is asked takes connections and never answers; it follows, so the others have a majority."""
    leader = await etcd_cluster.await_leader()
    hanging = next(member for member in etcd_cluster.members if member is not leader)
    lock = {"ttl": 12, "heartbeat_interval": 3}
    async with opened(etcd_cluster.url) as (locks, log), staying(locks.lock("a", **lock)) as stay:
        ask_first(locks._backend._gateway, hanging.port)
        hanging.pause()
        first = await log.seen(Renewed)
        assert first.spare > 3.8, "a call that hung for its whole interval would leave 3.5 s at most"
        await log.seen(Renewed, 2)
        async with locks.lock("b", ttl=10, wait=20) as lease:
            assert lease.held
        await stay.end()


async def test_dead_members_in_the_url_are_passed_over(etcd_cluster: EtcdCluster):
    dead = etcd_cluster.members[0]
    dead.kill()
    await etcd_cluster.await_leader()  # it may have been the killed one
    url = f"etcd://127.0.0.1:1,no-such-host.invalid:2379,127.0.0.1:{dead.port},{etcd_cluster.hosts}"
    async with opened(url) as (locks, _):
        async with locks.lock("a", wait=20) as lease:
            await lease.renew()


async def _watched(cluster: EtcdCluster) -> float:
    return await asyncio.to_thread(cluster.metric, "etcd_debugging_mvcc_watcher_total")


async def test_a_watch_at_a_member_that_lost_its_leader_ends(etcd_cluster: EtcdCluster):
    """It would hear of nothing; so it ends, and the client watches at another member."""
    async with backend_on(etcd_cluster.url) as backend, backend_on(etcd_cluster.url) as other:
        holder, waiter, rung = Claim("a", 60.0), Claim("a", 60.0), []
        await granted(other, holder)
        backend.listen(waiter, rung.append)
        await backend.draw(waiter)
        first = backend._gateway._endpoints.in_turn()[0].origin
        others = [member for member in etcd_cluster.members if member.origin != first]
        await eventually(lambda: _watched(etcd_cluster), what="the watch is opened")
        for member in others:
            member.pause()
        async with asyncio.timeout(90):
            while backend._gateway._endpoints.in_turn()[0].origin == first:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for member in others:
                member.resume()
            await answered(lambda: other.give_back(holder))
            while not rung:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


# A cluster of three etcd members whose network falls apart, while all of them run and take requests.


LEADER_OR_FOLLOWER = pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])


async def sides(cluster: EtcdCluster, *, leads: bool = True) -> tuple[EtcdMember, list[EtcdMember]]:
    """One member, which leads or follows, and the two others."""
    leader = await cluster.await_leader()
    one = leader if leads else next(member for member in cluster.members if member is not leader)
    return one, [member for member in cluster.members if member is not one]


def network_of(cluster: EtcdCluster) -> PeerNetwork:
    assert cluster.network is not None
    return cluster.network


def url_of(*members: EtcdMember) -> str:
    return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in members)


@pytest.mark.slow
@LEADER_OR_FOLLOWER
async def test_a_holder_at_the_cut_off_member_is_out_before_the_majority_hands_on(
    partitioned_etcd: EtcdCluster, leads: bool
):
    """It knows no other member. Its keep-alives may still be answered there; they prove nothing by themselves."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with opened(url_of(alone)) as (locks, _), opened(url_of(*rest)) as (others, _):
        async with staying(locks.lock("a", **SHORT_IN_LINE)) as stay:
            waiting = Stay(others.lock("a", ttl=20))
            await count_of_keys(partitioned_etcd, "a", 2)
            with network_of(partitioned_etcd).isolated(alone.address):
                await stay.over()
                assert stay.lost in ENDED_BY_TIME
                await waiting.begun()
                assert stay.body_ended_at < waiting.granted_at
                assert waiting.token > stay.token
        await waiting.end()
    await gone(partitioned_etcd, "fencing/")


@pytest.mark.campaign
@LEADER_OR_FOLLOWER
async def test_a_holder_that_knows_all_members_goes_on_at_the_majority(partitioned_etcd: EtcdCluster, leads: bool):
    """The member that it asks first is cut off, for longer than the ttl and the lease."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with opened(url_of(alone, *rest)) as (locks, log), opened(url_of(*rest)) as (others, _):
        async with staying(locks.lock("a", **KEPT)) as stay:
            with network_of(partitioned_etcd).isolated(alone.address):
                await held_for(BEYOND, log, others, "a")
            await stay.end()
        async with others.lock("a", wait=20) as lease:
            assert lease.token > stay.token
    await gone(partitioned_etcd, "fencing/")


@LEADER_OR_FOLLOWER
async def test_those_who_wait_on_both_sides_keep_their_order(partitioned_etcd: EtcdCluster, leads: bool):
    """Half of them watch at the member that is cut off, which hears of no release."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    clients = opened(url_of(alone, *rest)), opened(url_of(*rest, alone))
    async with clients[0] as (here, _), clients[1] as (there, _):
        async with staying(there.lock("a", ttl=20)) as first:
            stays = await six_in_line(partitioned_etcd, "a", here, there)
            with network_of(partitioned_etcd).isolated(alone.address):
                await first.end()
                await in_order(stays)
    await gone(partitioned_etcd, "fencing/")


@LEADER_OR_FOLLOWER
async def test_what_a_stale_holder_writes_at_the_cut_off_member_never_counts(
    partitioned_etcd: EtcdCluster, leads: bool
):
    """Not while it is cut off, and not when its log meets that of the majority."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with backend_on(url_of(*rest)) as backend, EtcdGuard(url_of(*rest)) as fresh, EtcdGuard(url_of(alone)) as old:
        claim = Claim("a", 30.0)
        token = await granted(backend, claim)
        await old.execute("a", token, put("data/a", "old"))
        with network_of(partitioned_etcd).isolated(alone.address):
            writing = asyncio.ensure_future(old.execute("a", token, put("data/a", "late")))
            await answered(lambda: backend.give_back(claim))
            following = Claim("a", 30.0)
            higher = await answered(lambda: granted(backend, following))
            await answered(lambda: fresh.execute("a", higher, put("data/a", "new")))
        with pytest.raises((BackendUnavailableError, StaleTokenError)):
            await writing
        await partitioned_etcd.command("kv/put", {"key": b64("x"), "value": b64("x")})
        (found,) = (await asyncio.to_thread(partitioned_etcd.keys, "data/")).values()
        assert found["value"] == b64("new")
        with pytest.raises(StaleTokenError):
            await old.execute("a", token, put("data/a", "later"))


# Refusals of etcd, and their errors: credentials, permissions, certificates, space.


PASSWORD = "hunter2@/:,"
QUOTED = "hunter2%40%2F%3A%2C"


@pytest.fixture
def secured(start_etcd: StartEtcd) -> EtcdCluster:
    return with_login(start_etcd())


def with_login(cluster: EtcdCluster) -> EtcdCluster:
    cluster.enable_auth(user="locker", password=PASSWORD)
    return cluster


def login(cluster: EtcdCluster, user: str = "locker", password: str = QUOTED) -> str:
    return cluster.url.replace("etcd://", f"etcd://{user}:{password}@")


async def refused(url: str, **options: str) -> BackendRefusedError:
    async with backend_on(url, **options) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.open()
    said = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in said
    return caught.value


async def test_a_user_limited_to_the_prefix_holds_locks_and_waits(secured: EtcdCluster):
    async with opened(login(secured)) as (locks, _):
        async with staying(locks.lock("a", ttl=10)) as stay:
            waiting = asyncio.create_task(locks.lock("a", wait=20).acquire())
            await asyncio.sleep(0.2)
            await stay.end()
            await (await waiting).release()


async def test_a_token_that_expired_is_made_again(start_etcd: StartEtcd):
    """etcd forgets a token that was not used for a second; the heartbeat is slower than that."""
    url = login(with_login(start_etcd(auth_token_ttl=1)))
    async with opened(url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=2.5)) as stay:
        await log.seen(Renewed)
        await stay.end()


async def test_tokens_that_a_restart_forgot_and_roles_that_changed_cost_nothing(secured: EtcdCluster):
    claims = [Claim(f"a/{number}", 30.0) for number in range(20)]
    async with backend_on(login(secured)) as backend:
        await asyncio.gather(*(granted(backend, claim) for claim in claims))
        await asyncio.to_thread(secured.kill)
        await asyncio.to_thread(secured.start)
        assert all(await kept(backend, *claims))
        secured.login_as_root()
        await secured.command("auth/role/add", {"name": "another"})
        assert all(await kept(backend, *claims))


async def test_many_calls_at_once_log_in_once(secured: EtcdCluster):
    """A login costs etcd a password hash, which is made to be slow."""
    before = secured.calls("Authenticate")
    async with backend_on(login(secured)) as backend:
        await asyncio.gather(*(backend.tickets([f"a/{number}"]) for number in range(20)))
    assert secured.calls("Authenticate") == before + 1


async def test_credentials_that_are_wrong_or_missing_are_refused_without_repeating_them(secured: EtcdCluster):
    assert "wrong user or password" in str(await refused(login(secured, password="hunter2")))
    assert "wrong user or password" in str(await refused(login(secured, user="nobody")))
    assert "user and a password" in str(await refused(secured.url))
    options = {"user": "locker", "password": "hunter2"}
    assert "wrong user or password" in str(await refused(secured.url, **options))


async def test_keys_outside_of_the_role_are_refused(secured: EtcdCluster):
    assert "role" in str(await refused(login(secured), prefix="elsewhere/"))
    async with EtcdGuard(login(secured)) as guard:
        with pytest.raises(BackendRefusedError, match="role"):
            await guard.raise_to("a", 1)
    async with EtcdGuard(login(secured), prefix="fencing/fences/") as guard:
        await guard.raise_to("a", 1)


async def test_credentials_where_etcd_asks_for_none_do_no_harm(etcd_server: EtcdCluster):
    async with backend_on(login(etcd_server)) as backend:
        await granted(backend, Claim("a", 10.0))


async def test_certificates_of_both_sides_are_checked(start_etcd: StartEtcd, etcd_certificates: Certificates):
    made = etcd_certificates
    cluster = start_etcd(tls=made)
    port = cluster.members[0].tls_port
    mine = {"ca": str(made.authority), "cert": str(made.client_certificate), "key": str(made.client_key)}
    async with backend_on(f"etcd+https://localhost:{port}", **mine) as backend:
        claim = Claim("a", 10.0)
        await granted(backend, claim)
        assert await kept(backend, claim) == [True]
    async with EtcdGuard(f"etcd+https://localhost:{port}", **mine) as guard:
        await guard.raise_to("a", 1)
    heard = f"localhost:{port}: the server's certificate is not trusted; name its authority with ca="
    assert heard in str(await refused(f"etcd+https://localhost:{port}"))
    plain = cluster.members[0].port
    for url, options, heard in (
        (f"etcd+https://localhost:{port}", {"ca": mine["ca"]}, f"localhost:{port}"),
        (f"etcd://localhost:{port}", {}, f"localhost:{port}: .*does it want TLS|With TLS, write etcd\\+https://"),
        (f"etcd+https://localhost:{plain}", mine, f"no connection to localhost:{plain} .*does it speak TLS"),
    ):
        async with backend_on(url, **options) as backend:
            with pytest.raises(BackendError, match=heard):
                await backend.open()


async def test_certificates_that_are_replaced_are_used_for_new_connections(start_etcd: StartEtcd, tmp_path: Path):
    made = make_certificates(tmp_path)
    cluster = start_etcd(tls=made)
    url = f"etcd+https://localhost:{cluster.members[0].tls_port}"
    mine = {"ca": str(made.authority), "cert": str(made.client_certificate), "key": str(made.client_key)}
    async with backend_on(url, **mine) as backend, EtcdGuard(url, **mine) as guard:
        await granted(backend, Claim("a", 60.0))
        await guard.raise_to("a", 1)
        await asyncio.to_thread(cluster.kill)
        await asyncio.to_thread(make_certificates, tmp_path)  # of another authority, under the same names
        await asyncio.to_thread(cluster.start)
        await answered(lambda: granted(backend, Claim("b", 60.0)))
        await guard.raise_to("a", 2)


async def test_an_etcd_whose_space_is_used_up_keeps_and_frees_what_is_held_and_grants_nothing(start_etcd: StartEtcd):
    cluster = start_etcd(quota_backend_bytes=1_000_000)
    async with backend_on(cluster.url) as backend:
        held, wanted = Claim("held", 30.0), Claim("wanted", 30.0)
        await granted(backend, held)
        with pytest.raises(EtcdError, match="space"):
            for number in range(100):
                await cluster.command("kv/put", {"key": b64(f"x{number}"), "value": b64("x" * 100_000)})
        with pytest.raises(BackendUnavailableError, match="NOSPACE"):
            await backend.draw(wanted)
        assert await kept(backend, held) == [True]
        await backend.give_back(held)
        assert await backend.tickets(["held"]) == [[]]
        for number in range(100):
            await cluster.command("kv/deleterange", {"key": b64(f"x{number}")})
        await asyncio.to_thread(cluster.compact)
        await cluster.command("maintenance/defragment")
        member = (await cluster.command("maintenance/status"))["header"]["member_id"]
        await cluster.command("maintenance/alarm", {"action": "DEACTIVATE", "memberID": member, "alarm": "NOSPACE"})
        async with asyncio.timeout(20):
            await granted(backend, wanted)


async def test_what_is_no_etcd_is_refused(etcd_server: EtcdCluster):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\nConnection: close\r\n\r\nNot Found")
        await writer.drain()
        writer.close()

    async with serving(answer) as port:
        assert "is this the client port of an etcd" in str(await refused(f"etcd://127.0.0.1:{port}"))
        url = f"etcd://127.0.0.1:{port},{etcd_server.hosts}"
        async with backend_on(url) as backend:
            await granted(backend, Claim("a", 10.0))
