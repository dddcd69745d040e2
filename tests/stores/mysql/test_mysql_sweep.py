"""The sweep of the tables of MySQL and MariaDB: tokens go on growing, and no call waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from mysql_server import MysqlServer
from mysql_stage import in_transaction
from stays import eventually

from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.mysql import MysqlBackend, from_url
from fencing_sdk.backends.mysql.connection import NOW
from fencing_sdk.backends.mysql.sweep import Sweeper

pytestmark = pytest.mark.slow

pytest_plugins = ["mysql_fixtures"]

OLD = f"{NOW} - 8 * 86400 * 1000000"
DEAD = "('a', {}, '{}', 'lock', 1, NULL, '', NULL, NULL, {}, 1, 1, NULL)"
"""A ticket."""


@pytest.fixture
async def backend(mysql_server: MysqlServer) -> AsyncIterator[MysqlBackend]:
    async with aclosing(from_url(mysql_server.url)) as made:
        await made.open()
        yield made


async def swept(backend: MysqlBackend) -> bool:
    return await backend._mysql.connection.run(Sweeper(backend._mysql).sweep)


async def names(server: MysqlServer) -> list[str]:
    return [name.decode() for (name,) in await server.fetch("SELECT name FROM fencing_line ORDER BY name")]


async def used(backend: MysqlBackend, name: str) -> int:
    claim = Claim(name, 60.0)
    place = await backend.draw(claim)
    assert isinstance(place, Place)
    await backend.give_back(claim)
    return place.token


async def grown_old(server: MysqlServer) -> None:
    await server.execute(
        "UPDATE fencing_line SET last = last - 8 * 86400 * 100000 WHERE name LIKE 'old%' AND last > 1000"
    )


async def test_old_rows_of_free_names_go_and_their_tokens_grow_on(mysql_server, backend):
    before = await used(backend, "old")
    await used(backend, "young")
    await backend.draw(Claim("old, held", 60.0))
    await grown_old(mysql_server)
    await swept(backend)
    assert await names(mysql_server) == ["old, held", "young"]
    assert await used(backend, "old") > before


async def test_a_name_whose_line_has_but_the_dead_goes(mysql_server, backend):
    await used(backend, "old")
    for owner in "xy":
        await mysql_server.execute(
            f"INSERT INTO fencing_ticket VALUES {DEAD.format(ord(owner), owner, OLD)}".replace("'a'", "'old'")
        )
    await mysql_server.execute("UPDATE fencing_line SET others = 1")
    await grown_old(mysql_server)
    await swept(backend)
    await swept(backend)
    assert await names(mysql_server) == []


async def test_what_killed_clients_left_goes_and_what_lives_stays(mysql_server, backend):
    for number, age, name in ((1, f"{NOW} + 60000000", "new"), (3, OLD, "old")):
        await mysql_server.execute(
            f"INSERT INTO fencing_bell (client, message, sent) VALUES ('{name}', 'x', {age});"
            f"INSERT INTO fencing_ticket VALUES {DEAD.format(number, name, age)}"
        )
    await swept(backend)
    for column in ("client FROM fencing_bell", "owner FROM fencing_ticket"):
        assert await mysql_server.fetch(f"SELECT {column}") == [(b"new",)], column


@pytest.mark.parametrize(("tokens", "left"), [("hybrid", ["first"]), ("counter", ["first", "old"])])
async def test_rows_are_deleted_by_the_way_but_never_with_a_counter(tokens, left, mysql_server):
    async with aclosing(from_url(mysql_server.url, tokens=tokens)) as backend:
        first = await used(backend, "old")
        await mysql_server.execute(f"INSERT INTO fencing_bell (client, message, sent) VALUES ('gone', 'x', {OLD})")
        await grown_old(mysql_server)
        backend._sweeper._due = 0.0
        await used(backend, "first")

        async def done() -> bool:
            return await names(mysql_server) == left and not await mysql_server.fetch("SELECT 1 FROM fencing_bell")

        await eventually(done, what=f"{left} are left")
        if tokens == "counter":
            assert (first, await used(backend, "old"), await used(backend, "new")) == (1, 2, 1)


async def test_a_walk_begins_at_a_name_in_use_and_passes_over_none(mysql_server):
    async with aclosing(from_url(mysql_server.url)) as backend:
        for name in ("old a", "old z"):
            await used(backend, name)
        await grown_old(mysql_server)
        for left in (["old a"], []):
            backend._sweeper._due = 0.0
            backend._sweeper.start_if_due("old m")

            async def done(left: list[str] = left) -> bool:
                return await names(mysql_server) == left

            await eventually(done, what=f"{left} are left")


async def test_a_token_ahead_of_the_clock_is_not_forgotten(mysql_server, backend):
    """As after a clock that was ahead and was set right: the next token would be lower."""
    await used(backend, "old")
    await grown_old(mysql_server)
    ahead = int(await mysql_server.value("SELECT last FROM fencing_line")) + 10 * 86400 * 100000
    await mysql_server.execute(f"UPDATE fencing_line SET last = {ahead}")
    await swept(backend)
    assert await names(mysql_server) == ["old"]
    assert await used(backend, "old") == ahead + 1


async def test_a_client_with_hybrid_tokens_keeps_the_counters_of_another(mysql_server, backend):
    async with aclosing(from_url(mysql_server.url, tokens="counter")) as other:
        assert [await used(other, "old"), await used(other, "old")] == [1, 2]
        await grown_old(mysql_server)
        await swept(backend)
        assert await used(other, "old") == 3


async def test_many_names_are_looked_at_page_by_page(mysql_server, backend, monkeypatch):
    """Renewals wait for each of them."""
    monkeypatch.setattr("fencing_sdk.backends.mysql.sweep._AT_ONCE", 2)
    every = ["old 1", "old 2", "old 3", "p", "q"]
    for name in every:
        await used(backend, name)
    await grown_old(mysql_server)
    sweeper, left = Sweeper(backend._mysql), []
    for _ in range(3):
        more = await backend._mysql.connection.run(sweeper.sweep)
        left.append((await names(mysql_server), more))
    assert left == [(every[2:], True), (every[3:], True), (every[3:], False)]


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_a_listing_passes_over_many_free_locks_page_by_page(limit, mysql_server, backend, monkeypatch):
    monkeypatch.setattr("fencing_sdk.backends.mysql.PAGE", 2)
    held = ["p1", "p4", "p5", "p9"]
    for name in ["o", *(f"p{number}" for number in range(10)), "q"]:
        await (backend.draw(Claim(name, 60.0)) if name in {"o", *held, "q"} else used(backend, name))
    asked, ask = [], backend._mysql.ask

    async def noted(statement: str) -> object:
        asked.append(statement)
        return await ask(statement)

    monkeypatch.setattr(backend._mysql, "ask", noted)
    listed, cursor = [], None
    while not listed or cursor is not None:
        page, cursor = await backend.names("p", cursor, limit)
        listed += page
    assert listed == held
    if limit == 10:
        assert len(asked) == 2 * (10 // 2) + 2  # after five whole pages, there may be more


LOCKED = ["fencing_line", "fencing_bell", "fencing_ticket"]


@pytest.mark.parametrize("table", LOCKED)
async def test_a_row_that_is_locked_does_not_hold_the_sweep_up(table, mysql_server, backend):
    """A sweep runs on the connection of the renewals."""
    for number in range(3):
        await used(backend, f"old {number}")
        await mysql_server.execute(
            f"INSERT INTO fencing_bell (client, message, sent) VALUES ('{number}', 'x', {OLD});"
            f"INSERT INTO fencing_ticket VALUES {DEAD.format(number, number, OLD)}"
        )
    await grown_old(mysql_server)
    async with in_transaction(mysql_server, f"SELECT * FROM {table} ORDER BY 1, 2 LIMIT 1 FOR UPDATE"):
        await swept(backend)
        assert [each for each in LOCKED if await mysql_server.fetch(f"SELECT 1 FROM {each}")] == [table]
    await swept(backend)
    assert [each for each in LOCKED if await mysql_server.fetch(f"SELECT 1 FROM {each}")] == []
