"""FenceColumn: the fence in the caller's own table, checked by the statement that writes."""

import asyncio
import sqlite3
from contextlib import closing

import asyncpg
import psycopg
import pytest
from postgresql_ways import opened
from sqlalchemy import BigInteger, Text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencing_sdk import ConfigurationError, StaleTokenError, Token, UsageError
from fencing_sdk.events import StaleRejected
from fencing_sdk.guards.sql import FenceColumn

pytest_plugins = ["postgresql_fixtures", "guard_database"]

TABLE = "CREATE TABLE seats (seat bigint PRIMARY KEY, who text, fence bigint NOT NULL DEFAULT 0)"
ROW = "INSERT INTO seats (seat) VALUES (42)"
BOOK = "UPDATE seats SET who = {}, fence = {} WHERE seat = {} AND fence <= {}"
NUMBERED = BOOK.format("$1", "$2", "$3", "$2")


class Base(DeclarativeBase): ...


class Seat(Base):
    __tablename__ = "seats"
    seat: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    who: Mapped[str | None] = mapped_column(Text)
    fence: Mapped[int] = mapped_column(BigInteger)


class Through:
    """Books a seat in a transaction of its own, and asks whether it was."""

    def __init__(self, url, path):
        self.url, self.path = url, path
        self.seats = FenceColumn("seats", key="seat")

    async def asyncpg(self, seat, token, who):
        connection = await asyncpg.connect(self.url)
        try:
            async with connection.transaction():
                done = await connection.execute(NUMBERED, who, token, seat)
                return await self.seats.written(connection, seat, token, done)
        finally:
            await connection.close()

    async def psycopg(self, seat, token, who):
        async with await psycopg.AsyncConnection.connect(self.url) as connection:
            done = await connection.execute(BOOK.format(*["%s"] * 4), (who, token, seat, token))
            return await self.seats.written(connection, seat, token, done)

    async def session(self, seat, token, who):
        async with opened("session", self.url) as way, way.begin() as session:
            return await self.with_the_orm(session, seat, token, who)

    async def with_the_orm(self, session, seat, token, who):
        statement = update(Seat).values(who=who, fence=token).where(Seat.seat == seat, Seat.fence <= token)
        done = await session.execute(statement)
        return await self.seats.written(session, seat, token, done)

    async def sqlite3(self, seat, token, who):
        def book():
            with closing(sqlite3.connect(self.path)) as connection, connection:
                done = connection.execute(BOOK.format(*"????"), (who, token, seat, token))
                return self.seats.written_sync(connection, seat, token, done)

        return await asyncio.to_thread(book)


@pytest.fixture
async def through(server, tmp_path):
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(TABLE)
        connection.execute(ROW)
    await server.execute(f"{TABLE}; {ROW}")
    return Through(server.url, path)


KINDS = ["asyncpg", "psycopg", "session", "sqlite3"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stale_write_is_told_from_a_row_that_is_not_there(kind, through):
    book = getattr(through, kind)
    assert await book(42, 33, "Ada") is True
    assert await book(42, 34, "Bob") is True
    assert await book(42, 34, "Bob again") is True
    for _ in range(2):
        with pytest.raises(StaleTokenError) as refusal:
            await book(42, 33, "Ada")
        error = refusal.value
        assert (error.resource, error.token, error.fence, error.conflict) == ("seats/42", 33, 34, False)
    assert await book(43, 35, "Eve") is False


async def test_of_two_writers_at_once_the_later_token_wins(through, server):
    """The statement waits for the row, and its condition is looked at again."""
    async with server.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(NUMBERED, "Bob", 34, 42)
        late = asyncio.create_task(through.asyncpg(42, 33, "Ada"))
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        for _ in range(2_000):
            if await server.value(query):
                break
            await asyncio.sleep(0.01)
        assert not late.done()
        await transaction.commit()
    with pytest.raises(StaleTokenError):
        await late
    assert await server.value("SELECT who FROM seats") == "Bob"


async def test_a_condition_of_your_own_is_not_mistaken_for_a_stale_token(through, server):
    async with server.connected() as connection, connection.transaction():
        done = await connection.execute(NUMBERED + " AND who = 'nobody'", "Ada", 33, 42)
        assert await through.seats.written(connection, 42, 33, done) is False


async def test_a_fence_that_is_null_is_an_error(server):
    """No token is above NULL, so the row could never be written."""
    await server.execute("CREATE TABLE seats (seat bigint, who text, fence bigint); " + ROW)
    async with server.connected() as connection, connection.transaction():
        done = await connection.execute(NUMBERED, "Ada", 33, 42)
        with pytest.raises(UsageError, match="NOT NULL DEFAULT 0"):
            await FenceColumn("seats", key="seat").written(connection, 42, 33, done)


@pytest.mark.parametrize("kind", ["INTEGER", "smallint", "real", "slot"])
async def test_a_fence_column_that_is_too_narrow_is_refused_by_name(kind, server):
    """Small tokens, such as those of tokens=counter, get into it, until one does not."""
    await server.execute(f"CREATE DOMAIN slot AS integer; {TABLE.replace('fence bigint', f'fence {kind}')}; {ROW}")
    seats = FenceColumn("seats", key="seat")
    async with server.connected() as connection, connection.transaction():
        done = await connection.execute("UPDATE seats SET who = 'Ada', fence = 34 WHERE seat = 42 AND fence <= 34")
        with pytest.raises(UsageError) as refusal:
            await seats.written(connection, 42, 34, done)
    found = "INTEGER" if kind == "slot" else kind.upper()
    assert f"column fence of table seats is {found}" in str(refusal.value)
    assert 'ALTER TABLE "seats" ALTER COLUMN "fence" TYPE BIGINT' in str(refusal.value)


async def test_names_are_quoted_and_may_have_a_schema(server):
    await server.execute("""
        CREATE SCHEMA other;
        CREATE TABLE other."order" ("Key" text, "select" bigint NOT NULL DEFAULT 0);
        INSERT INTO other."order" VALUES ('''; DROP TABLE data', 34)
    """)
    column = FenceColumn("other.order", key="Key", column="select")
    async with server.connected() as connection, connection.transaction():
        with pytest.raises(StaleTokenError):
            await column.written(connection, "'; DROP TABLE data", 33, 0)


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a;b", "1a", "a.b", "a" * 64, None])
def test_a_name_that_would_need_escaping_is_refused(name):
    for names in ({"key": name}, {"key": "id", "column": name}):
        with pytest.raises(ConfigurationError, match=next(reversed(names))):
            FenceColumn("seats", **names)
    with pytest.raises(ConfigurationError, match="table must be"):
        FenceColumn(f"{name}.b.c", key="id")


@pytest.mark.parametrize("outcome", [None, True, -1, "", "UPDATE", object(), 1.0])
async def test_what_tells_no_number_of_rows_is_refused(outcome, through):
    """Such as the cursor of a driver that does not count."""
    with closing(sqlite3.connect(through.path)) as connection:
        with pytest.raises(UsageError, match="outcome must be"):
            through.seats.written_sync(connection, 42, 33, outcome)
        with pytest.raises(UsageError, match="outcome must be"):
            await through.seats.written(connection, 42, 33, outcome)


async def test_an_update_of_several_rows_is_refused(through, server):
    """It left out the rows that a later token had written, in silence."""
    await server.execute("INSERT INTO seats VALUES (43, NULL, 0), (44, NULL, 35)")
    with pytest.raises(UsageError, match="changed 2 rows"):
        async with server.connected() as connection, connection.transaction():
            done = await connection.execute("UPDATE seats SET who = 'Ada', fence = 34 WHERE fence <= 34")
            await through.seats.written(connection, 42, 34, done)
    assert await server.value("SELECT count(*) FROM seats WHERE who IS NULL") == 3
    with closing(sqlite3.connect(through.path)) as connection:
        with pytest.raises(UsageError, match="changed 2 rows"):
            through.seats.written_sync(connection, 42, 34, 2)


async def test_observers_are_told_about_refusals(through):
    events = []
    through.seats = FenceColumn("seats", key="seat", observers=[events.append])
    await through.sqlite3(42, 34, "Bob")
    with pytest.raises(StaleTokenError):
        await through.sqlite3(42, Token(33, "aaaaaaaa"), "Ada")
    assert [(type(event), event.resource, event.token, event.fence) for event in events] == [
        (StaleRejected, "seats/42", 33, 34)
    ]


async def test_a_write_with_what_is_no_token_is_refused(through):
    for outcome in (0, 1):
        with pytest.raises(ConfigurationError, match="token"):
            await through.seats.written(None, 42, True, outcome)
        with pytest.raises(ConfigurationError, match="token"):
            through.seats.written_sync(None, 42, -1, outcome)
