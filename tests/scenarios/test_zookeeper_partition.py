"""An ensemble whose members cannot reach each other: a leader on its own, and a follower on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from event_log import CLOCK, ENDED_BY_TIME
from stays import PATIENCE, SHORT, eventually, opened, staying
from zookeeper_network import MemberNetwork
from zookeeper_server import ZooKeeperEnsemble, fresh_root, require_zookeeper

from fencing_sdk._lease import state_of
from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.errors import BackendUnavailableError

LIMIT = 3 * PATIENCE


@pytest.fixture(scope="module")
def member_network() -> Iterator[MemberNetwork]:
    network = MemberNetwork([1, 2, 3])
    yield network
    network.close()


@pytest.fixture(scope="module")
def _split_ensemble(member_network: MemberNetwork) -> Iterator[ZooKeeperEnsemble]:
    require_zookeeper()
    with ZooKeeperEnsemble(network=member_network) as ensemble:
        yield ensemble


@pytest.fixture
def split_ensemble(_split_ensemble: ZooKeeperEnsemble, member_network: MemberNetwork) -> Iterator[ZooKeeperEnsemble]:
    """Three members that reach each other by way of `member_network`."""
    _split_ensemble.heal()
    yield _split_ensemble
    member_network.heal()


async def test_a_leader_on_its_own_keeps_no_lease_alive_until_the_majority_grants_another_one(
    split_ensemble, member_network
):
    """The client on the leader's side hears nothing of the new leader. Its work ends before that grants the lock."""
    root = fresh_root()
    old = await asyncio.to_thread(lambda: split_ensemble.leader)
    rest = ",".join(member.address for member in split_ensemble.members if member is not old)
    async with opened(f"{old.url}{root}") as (locks, _), opened(f"zk://{rest}{root}") as (others, _):
        async with staying(locks.lock("a", **SHORT)) as stay:
            member_network.split(old.member)
            second = await asyncio.wait_for(others.lock("a", ttl=LIMIT).acquire(), LIMIT)
            granted_at = CLOCK.now()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert stay.body_ended_at < granted_at
            assert second.token >> 32 > stay.token >> 32, "another leader granted it"
        member_network.heal()
        await eventually(lambda: _follows(old), what="the old leader follows")
        await second.release()
        third = await asyncio.wait_for(locks.lock("a", ttl=LIMIT).acquire(), LIMIT)
        assert third.token > state_of(second).number
        await third.release()


async def _follows(member) -> bool:
    return await asyncio.to_thread(member.role) == "follower"


async def test_who_may_ask_all_members_keeps_its_lease_although_its_follower_is_cut_off(split_ensemble, member_network):
    """The follower closes its connections when it has lost the leader; the session goes on with another member."""
    root = fresh_root()
    lone = (await asyncio.to_thread(lambda: split_ensemble.followers))[0]
    rest = [member for member in split_ensemble.members if member is not lone]
    away, everywhere = from_url(f"{lone.url}{root}"), from_url(f"zk://{lone.address}{root}")
    claim, other = Claim("a", 60.0), Claim("b", 60.0)
    grant = await everywhere.acquire(claim)
    session = everywhere._sessions.of(60.0)
    assert isinstance(grant, Grant)
    assert isinstance(await away.acquire(other), Grant)
    addresses = [member.address.rpartition(":") for member in split_ensemble.members]
    hosts = [(host, int(port)) for host, _, port in addresses]
    session._driver._client.set_hosts(hosts)  # it may ask all of them, and is connected to this one
    member_network.split(lone.member)
    await eventually(lambda: _silent(lone), what="the follower has noticed")
    with pytest.raises(BackendUnavailableError):
        await away.renew([other])
    await eventually(lambda: _renews(everywhere, claim), what="a renewal by way of another member")
    assert session.id == everywhere._sessions.of(60.0).id
    assert await everywhere.acquire(claim) == grant
    assert all(member.role(patience=PATIENCE) in {"leader", "follower"} for member in rest)
    member_network.heal()
    await eventually(lambda: _renews(away, other), what="a renewal, when the follower is back")
    for backend, held in ((away, other), (everywhere, claim)):
        await backend.release(held)
        await backend.aclose()


async def _silent(member) -> bool:
    return not await asyncio.to_thread(member.role)


async def _renews(backend, claim) -> bool:
    try:
        return await backend.renew([claim]) == [Renewal.RENEWED]
    except BackendUnavailableError:
        return False
