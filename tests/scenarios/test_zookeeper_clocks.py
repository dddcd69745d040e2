"""A leader whose wall clock jumps: ZooKeeper counts sessions by another clock, and tokens by transactions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from event_log import CLOCK
from required_program import require_program
from stays import PATIENCE, eventually, opened, staying
from zookeeper_clock import WallClock
from zookeeper_server import ZooKeeperEnsemble, fresh_root, require_zookeeper
from zookeeper_stage import Operator, granted, operating

from fencing_sdk._lease import state_of
from fencing_sdk._values.claim import Claim
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import ALL_CLIENTS, create_persistent, delete, get

LIMIT = 3 * PATIENCE
HOURS = 6 * 3600


@pytest.fixture(scope="module")
def member_clocks(tmp_path_factory: pytest.TempPathFactory) -> list[WallClock]:
    require_program("cc", "gcc libc6-dev")
    return [WallClock(tmp_path_factory.mktemp("clock")) for _ in range(3)]


@pytest.fixture(scope="module")
def clocked_ensemble(member_clocks: list[WallClock]) -> Iterator[ZooKeeperEnsemble]:
    """Three members with clocks of their own."""
    require_zookeeper()
    ensemble = ZooKeeperEnsemble()
    for member, clock in zip(ensemble.members, member_clocks, strict=True):
        member.prefix = clock.prefix
    with ensemble:
        yield ensemble


@pytest.mark.parametrize("hours", [HOURS, -HOURS], ids=["ahead", "behind"])
async def test_a_wall_clock_that_jumps_ends_no_session_and_keeps_none_alive(hours, clocked_ensemble, member_clocks):
    """Neither that of a holder who lives, nor that of one who has gone; and tokens grow, also under the next leader."""
    await asyncio.to_thread(clocked_ensemble.heal)
    leader = await asyncio.to_thread(lambda: clocked_ensemble.leader)
    url, clock = f"{clocked_ensemble.url}{fresh_root()}", member_clocks[leader.member - 1]
    async with opened(url) as (locks, log), operating(url) as operator:
        async with staying(locks.lock("living", ttl=10, heartbeat_interval=0.5)) as stay:
            gone = from_url(url)
            left_at = CLOCK.now()
            before = await granted(gone, Claim("gone", 2.0))
            await gone.aclose()  # without its session, which nobody keeps alive from now on
            clock.shift(hours)
            assert abs(await _wall_clock(operator) - time.time() - hours) < HOURS / 2
            after = await asyncio.wait_for(locks.lock("gone", ttl=2).acquire(), LIMIT)
            assert left_at + 2 < CLOCK.now() < left_at + LIMIT
            assert after.token > before.token
            since = len(log.events)
            await eventually(lambda: _renewed(log, since), what="a renewal")
            await stay.end()
        await after.release()
        await asyncio.to_thread(leader.kill)
        async with asyncio.timeout(LIMIT), locks.lock("gone", ttl=LIMIT) as last:
            assert last.token > state_of(after).number
    clock.shift(0)


async def _wall_clock(operator: Operator) -> float:
    """The time that the leader writes into a node."""
    session = await operator.session()
    path = f"{operator._paths.root}/clock"
    await session.call(create_persistent(path, ALL_CLIENTS))
    _, stat = await session.call(get(path))
    await session.call(delete(path))
    return stat.ctime / 1000


async def _renewed(log, since: int) -> bool:
    return any(event.kind == "renewed" for event in log.events[since:])
