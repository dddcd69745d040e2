"""A lost lease ends the query that its body waits for, also on the server: the next holder must not wait for it."""

import asyncio

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from fencing_sdk import LeaseLostError

pytest_plugins = ["postgresql_fixtures"]

LONG_BEFORE_ITS_END = 15
"""Seconds: half of what the query would take, and much more than a busy machine needs to stop it."""
RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(30)%' AND state = 'active'"


@pytest.fixture(autouse=True)
def one_cancellation_at_first(monkeypatch):
    """A second one would break the driver's request to the server, which a busy machine may take seconds for."""
    monkeypatch.setattr("fencing_sdk._engine.lease_scope._LONGEST_PAUSE", 5.0)


@pytest.mark.parametrize("driver", ["asyncpg", "sqlalchemy"])
@pytest.mark.every_loop
async def test_the_query_of_a_body_that_lost_its_lease_is_gone_from_the_server_long_before_its_end(
    driver, stage, postgresql_server
):
    url = postgresql_server.url

    async def query():
        if driver == "asyncpg":
            connection = await asyncpg.connect(url)
            try:
                await connection.execute("SELECT pg_sleep(30)")
            finally:
                await connection.close(timeout=10)
        else:
            async with engine.begin() as connection:
                await connection.execute(text("SELECT pg_sleep(30)"))

    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))  # imports block: not in a lease

    watching = await asyncpg.connect(postgresql_server.url)

    async def lose_while_it_runs() -> None:
        while not await watching.fetchval(RUNNING):  # noqa: ASYNC110  (a server has no event)
            await asyncio.sleep(0.01)
        stage.store.take_away("a")
        async with asyncio.timeout(LONG_BEFORE_ITS_END):
            while await watching.fetchval(RUNNING):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    losing = asyncio.create_task(lose_while_it_runs())
    with pytest.raises(LeaseLostError):
        async with stage.lock(ttl=60.0):
            await query()
    await losing
    await watching.close()
    await engine.dispose()
