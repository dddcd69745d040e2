"""
One database for all tests of a module about guards on PostgreSQL: ``pytest_plugins = [..., "guard_database"]``.

Each test finds it with an empty table ``data``. That is quicker than a database for each of them.
"""

from __future__ import annotations

import copy

import pytest
from postgresql_programs import USER
from postgresql_ways import DATA


@pytest.fixture(scope="module")
def _guard_database(_shared_postgresql):
    server = copy.copy(_shared_postgresql)
    server.database = USER
    server.ask("CREATE DATABASE guards TEMPLATE template0")
    server.database = "guards"
    yield server
    server.database = USER
    server.ask("DROP DATABASE guards WITH (FORCE)")


async def emptied(server):
    """Leave nothing in the database but an empty table that the guard knows nothing of."""
    await server.execute(
        f"""
        DROP SCHEMA IF EXISTS public, other, app, "order" CASCADE;
        CREATE SCHEMA public;
        {DATA}
        """
    )
    return server


@pytest.fixture
async def server(_guard_database):
    """The server, whose `url` names the database, with a table that the guard knows nothing of."""
    return await emptied(_guard_database)
