"""What a failover loses, and what the SDK makes of it: replication really cut, a replica really promoted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import mysql_replicas
import postgresql_replicas
import pytest
import redis_replicas
from stays import PATIENCE, answered, opened, staying

from fencing_sdk import BackendUnavailableError, LossReason, StaleTokenError
from fencing_sdk.events import Lost, Renewed
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures", "redis_fixtures"]

FAR = {"ttl": 40.0, "heartbeat_interval": 0.5}
"""For a lease that outlives the failover."""


class FailoverSuite:
    """A store brings the fixture ``group``: servers, one of which follows the other."""

    async def grants_around_a_failover(self, group: Any, tokens: str) -> tuple[int, int]:
        """The token of a grant that the replica never received, and of the next one, by that replica."""
        async with opened(group.primary.url, tokens=tokens) as (before, _):
            for _ in range(3):
                async with before.lock("a", wait=PATIENCE):
                    pass
            await group.synced()
            group.cut_replication()
            lost = await before.lock("a", ttl=60).acquire()
            first = lost.token
            promoted = await group.promote()
            async with opened(promoted.url, tokens=tokens) as (after, _):
                second = await after.lock("a", wait=PATIENCE).acquire()  # the new primary knows nothing of the first
                return first, second.token

    @pytest.mark.parametrize("tokens", ["hybrid", "counter"])
    async def test_a_holder_whose_grant_was_lost_is_refused_by_a_guard(self, tokens: str, group: Any):
        """A plain counter repeats the token, which is its stated risk, and why a guard compares holders too."""
        first, second = await self.grants_around_a_failover(group, tokens)
        assert (first < second) is (tokens == "hybrid")
        assert (first == second) is (tokens == "counter")
        guard = MemoryGuard()
        await guard.raise_to("a", second)
        with pytest.raises(StaleTokenError) as refused:
            guard.admit("a", first)
        assert refused.value.conflict is (tokens == "counter")


@pytest.mark.usefixtures("answers_may_be_late")
class TestRedis(FailoverSuite):
    @pytest.fixture
    async def group(self, redis_binary: str) -> AsyncIterator[redis_replicas.Replicated]:
        async with redis_replicas.Replicated(binary=redis_binary) as group:
            yield group


class TestPostgresql(FailoverSuite):
    @pytest.fixture
    def group(self, postgresql_group: postgresql_replicas.Replicated) -> postgresql_replicas.Replicated:
        return postgresql_group


class TestMysql(FailoverSuite):
    @pytest.fixture
    async def group(self, mysql_flavour: str) -> AsyncIterator[mysql_replicas.Replicated]:
        async with mysql_replicas.Replicated(mysql_flavour) as group:
            yield group

    @pytest.mark.parametrize(("how", "said"), [("kill", "is it a replica"), ("pause", "inspect failed")])
    async def test_a_client_goes_on_with_the_promoted_replica(self, how: str, said: str, group: Any):
        """The lease that was replicated goes on with its token, over a dead or silent primary and a new one."""
        async with opened(group.url) as (locks, log), staying(locks.lock("a", **FAR)) as stay:
            await log.seen(Renewed)
            await group.synced()
            getattr(group.primary, how)()
            with pytest.raises(BackendUnavailableError, match=said):
                await locks.inspect("a")
            await group.promote()
            await log.seen(Renewed, len(log.of(Renewed)) + 2)
            found = await answered(lambda: locks.inspect("a"))
            assert (found.token, found.id) == (stay.token, stay.lease.holder)
            await stay.end()
            async with locks.lock("a", wait=PATIENCE) as lease:
                assert lease.token > stay.token
        assert log.of(Lost) == []

    async def test_a_primary_that_comes_back_as_a_second_one_is_used_until_it_is_read_only(
        self, group: Any, monkeypatch: pytest.MonkeyPatch
    ):
        """Two may hold one lock meanwhile, and a guard refuses the older; leases from before exclude both."""
        async with opened(group.url) as (early, log), staying(early.lock("a", **FAR)) as stay:
            await log.seen(Renewed)
            await group.synced()
            group.primary.pause()
            await group.promote()
            older = await early.lock("b", wait=PATIENCE, **FAR).acquire()
            group.primary.resume()
            monkeypatch.setattr("fencing_sdk._values.tasks.HEAD_START", PATIENCE)  # it comes back in its time
            async with opened(group.url) as (late, _):
                assert await answered(late.lock("a").try_acquire) is None
                newer = await late.lock("b", wait=PATIENCE, **FAR).acquire()
                await older.renew()
                guard = MemoryGuard()
                await guard.raise_to("b", newer.token)
                with pytest.raises(StaleTokenError):
                    guard.admit("b", older.token)
                await group.primary.execute("SET GLOBAL read_only = ON")
                await asyncio.wait_for(newer.wait_lost(), PATIENCE)
                assert newer.lost_reason is LossReason.TAKEN_OVER
                assert await answered(late.lock("a").try_acquire) is None
            await stay.end()
            await older.release()
        assert log.of(Lost) == []
