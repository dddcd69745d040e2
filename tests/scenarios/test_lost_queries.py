"""A lost lease ends the query that its body waits for, also on the server: the next holder must not wait for it."""

import asyncio

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from fencing_sdk import LeaseLostError

pytest_plugins = ["postgresql_fixtures"]

RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(30)%' AND state = 'active'"


async def gone_after(connection) -> float:
    """Seconds until the server has stopped the query."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while await connection.fetchval(RUNNING):  # noqa: ASYNC110  (a server has no event)
        await asyncio.sleep(0.01)
    return loop.time() - started


@pytest.mark.parametrize("ttl", [1.0, 15.0])
@pytest.mark.parametrize("driver", ["asyncpg", "sqlalchemy"])
@pytest.mark.every_loop
async def test_the_query_of_a_body_that_lost_its_lease_is_gone_from_the_server_within_half_a_second(
    driver, ttl, stage, postgresql_server
):
    url = postgresql_server.url

    async def query():
        if driver == "asyncpg":
            connection = await asyncpg.connect(url)
            try:
                await connection.execute("SELECT pg_sleep(30)")
            finally:
                await connection.close(timeout=1)
        else:
            async with engine.begin() as connection:
                await connection.execute(text("SELECT pg_sleep(30)"))

    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))  # imports block: not in a lease

    watching = await asyncpg.connect(postgresql_server.url)

    async def lose_while_it_runs() -> float:
        while not await watching.fetchval(RUNNING):  # noqa: ASYNC110  (a server has no event)
            await asyncio.sleep(0.01)
        stage.store.take_away("a")
        return await gone_after(watching)

    losing = asyncio.create_task(lose_while_it_runs())
    with pytest.raises(LeaseLostError):
        async with stage.lock(ttl=ttl):
            await query()
    assert await losing < 0.5
    await watching.close()
    await engine.dispose()
