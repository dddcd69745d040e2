"""PostgreSQL beside the rules, on a clock that is set by hand: the functions read it from a table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from campaigns import amount
from postgresql_server import PostgresqlServer

from fencing_sdk.abc import Claim
from fencing_sdk.backends import from_url
from fencing_sdk.backends.postgresql import PostgresqlBackend, schema
from fencing_sdk.testing import Comparison

pytest_plugins = ["postgresql_fixtures"]
NONE = ("", "")
_SQL_CLOCK = re.compile(r"(pg_catalog\.)?clock_timestamp\(\)")
_OWN_SQL_CLOCK = """
CREATE TABLE IF NOT EXISTS :"schema".oracle_clock AS SELECT pg_catalog.to_timestamp(500000) AS at;
CREATE OR REPLACE FUNCTION :"schema".oracle_now() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $fencing$ SELECT at FROM :"schema".oracle_clock $fencing$;
"""


@asynccontextmanager
async def on_postgresql(
    server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> AsyncIterator[list]:
    old, new = change
    assert old in schema._TEXT
    text = schema._TEXT.replace(old, new) if old else schema._TEXT
    monkeypatch.setattr(schema, "_TEXT", _OWN_SQL_CLOCK + _SQL_CLOCK.sub(':"schema".oracle_now()', text))
    look = PostgresqlBackend.tickets

    async def tickets(self, names):
        """Settle the lines before a look, as the rules do."""
        for name in names:
            settle = f"SELECT fencing_settle(name, last, NULL, false) FROM fencing_line WHERE name = '{name}'"
            server.ask(f"SET search_path TO fencing, pg_catalog; {settle}")
        return await look(self, names)

    monkeypatch.setattr(PostgresqlBackend, "tickets", tickets)
    async with AsyncExitStack() as stack:
        stores = [from_url(f"{server.url}?tokens=counter") for _ in range(2)]
        for store in stores:
            assert isinstance(store, PostgresqlBackend)
            await stack.enter_async_context(aclosing(store))
            await store.open()
        yield stores


async def compare(stores: list[PostgresqlBackend], server: PostgresqlServer, histories: int) -> None:
    """Play so many histories, on a clock that goes on: one that was set back makes the dead end late."""

    def set_clock(time: float) -> None:
        server.ask(f"UPDATE fencing.oracle_clock SET at = to_timestamp({time!r})")

    for seed in range(histories):
        set_clock(500_000.0)
        await Comparison(stores, seed, set_clock, sets_back=False).play()


@pytest.mark.campaign
async def test_postgresql_answers_as_the_rules(postgresql_server, monkeypatch):
    async with on_postgresql(postgresql_server, monkeypatch, NONE) as stores:
        await compare(stores, postgresql_server, amount(300, short=12))


SQL_FAULTS = {
    "the dead hold up those behind them": ("IF t.dies <= clock_timestamp() THEN", "IF false THEN"),
    "a keep revives": (
        "FROM mine WHERE t.ctid = mine.row AND t.dies > clock_timestamp()",
        "FROM mine WHERE t.ctid = mine.row",
    ),
    "permits off by one": ("v_ahead >= t.width", "v_ahead > t.width"),
    "a newcomer of the same mode overtakes": ("EXIT WHEN v_ahead", "CONTINUE WHEN v_ahead"),
    "readers with a token each": ("CASE WHEN t.mode = 'reader' THEN v_readers END", "NULL::bigint"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SQL_FAULTS)
async def test_a_change_of_the_sql_is_caught(fault, postgresql_server, monkeypatch):
    async with on_postgresql(postgresql_server, monkeypatch, SQL_FAULTS[fault]) as stores:
        with pytest.raises(AssertionError):
            await compare(stores, postgresql_server, 60)


# A race whose window is a few microseconds wide, held open.


async def holders_after_a_race(server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, *changes: str) -> list[str]:
    """
    Return who holds after a keep that was not committed when its ticket had died for those who read it.

    Meanwhile another owner drew a ticket.
    """
    old, new = changes or NONE
    assert old in schema._TEXT
    monkeypatch.setattr(schema, "_TEXT", schema._TEXT.replace(old, new) if old else schema._TEXT)
    first, second = Claim("race", 0.5, owner="first"), Claim("race", 20.0, owner="second")
    asked = "ARRAY['race'], ARRAY['first'], ARRAY[0]::bigint[], ARRAY[20000000]::bigint[]"
    keep = f"SELECT fencing.fencing_keep({asked}, false)"
    async with aclosing(from_url(server.url)) as store, server.connected() as session:
        await store.draw(first)
        async with session.transaction():
            await session.execute(keep)
            await asyncio.sleep(0.6)
            await store.draw(second)
        (line,) = await store.tickets(["race"])
    names = {claim.holder: claim.owner for claim in (first, second)}
    return [names[seen.holder] for seen in line if seen.token is not None]


async def test_a_ticket_whose_keep_is_in_flight_counts_as_living(postgresql_server, monkeypatch):
    assert await holders_after_a_race(postgresql_server, monkeypatch) == ["first"]


async def test_one_that_is_passed_over_without_being_deleted_would_come_back(postgresql_server, monkeypatch):
    both = await holders_after_a_race(postgresql_server, monkeypatch, "CONTINUE WHEN FOUND;", "CONTINUE;")
    assert both == ["first", "second"]
