"""What `GuardSuite` needs of a `SqlGuard` on a server: its adapters write through one of the ways to a transaction."""

from contextlib import asynccontextmanager

import postgresql_ways
import pytest

from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.testing.promises.under_test import GuardUnderTest


class ThroughAWay(GuardUnderTest):
    """Before `GuardSuite`. The class brings the fixture ``server``, the `ways` to it, and the `way` that it takes."""

    several = True
    ways = postgresql_ways.WAYS
    way: str

    def make_guard(self, way):
        return SqlGuard(way.url)

    @asynccontextmanager
    async def opened(self, url):
        async with postgresql_ways.opened(self.way, url, self.ways) as way:
            guard = self.make_guard(way)
            guard.way = way  # what the adapters write through
            yield guard

    @pytest.fixture
    async def guard(self, server):
        async with self.opened(server.url) as guard:
            yield guard

    @asynccontextmanager
    async def reopen(self, guard):
        async with self.opened(guard.way.url) as other:
            yield other

    async def write(self, guard, resource, token, value):
        await guard.way.write(guard, resource, token, value)

    async def write_all(self, guard, tokens, values):
        await guard.way.write_all(guard, tokens, values)

    async def read(self, guard, resource):
        return await guard.way.read(resource)
