"""What a failover loses, and what the SDK makes of it: replication really cut, a replica really promoted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import mysql_replicas
import postgresql_replicas
import pytest
import redis_replicas
from stays import PATIENCE, opened

from fencing_sdk import BackendUnavailableError, StaleTokenError
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures", "redis_fixtures"]


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

    async def test_a_client_goes_on_with_the_promoted_replica_when_the_primary_is_killed(self, group: Any):
        async with opened(group.url) as (locks, _):
            async with locks.lock("a", wait=PATIENCE) as lease:
                first = lease.token
            await group.synced()
            group.primary.kill()
            with pytest.raises(BackendUnavailableError, match="the server is a replica"):
                await locks.inspect("a")
            await group.promote()
            async with locks.lock("a", wait=PATIENCE) as lease:
                assert lease.token > first
