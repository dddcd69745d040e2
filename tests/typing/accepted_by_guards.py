"""Which connections a type checker is to let into a guard. Never run; `mypy tests/typing` reads it."""

import sqlite3

import aiomysql
import aiosqlite
import asyncmy.connection
import asyncpg
import psycopg
import pymysql
from psycopg.rows import DictRow, TupleRow
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session

from fencing_sdk import connect
from fencing_sdk.guards.sql import FenceColumn, SqlGuard

locks = connect("memory://")
guard = SqlGuard(create_async_engine("sqlite+aiosqlite:///app.db"))


async def connections_that_are_awaited(
    plain: asyncpg.Connection,
    pool: asyncpg.Pool,
    psycopg_async: psycopg.AsyncConnection[TupleRow],
    with_other_rows: psycopg.AsyncConnection[DictRow],
    of_aiosqlite: aiosqlite.Connection,
    connection: AsyncConnection,
    session: AsyncSession,
) -> None:
    await guard.admit(plain, "a", 1)
    async with pool.acquire() as proxy, proxy.transaction():
        await guard.admit(proxy, "a", 1)
    await guard.admit(psycopg_async, "a", 1)
    await guard.admit(with_other_rows, "a", 1)
    await guard.admit(of_aiosqlite, "a", 1)
    await guard.admit(connection, "a", 1)
    await guard.admit(session, "a", 1)
    await guard.raise_in(session, "a", 1)
    async with locks.multilock("a", "b", fences=[guard]) as held:
        for transaction in (plain, psycopg_async, with_other_rows, connection, session):
            await guard.admit_all(transaction, held.tokens)


async def connections_that_block(
    file: sqlite3.Connection,
    plain: psycopg.Connection[TupleRow],
    with_other_rows: psycopg.Connection[DictRow],
    connection: Connection,
    session: Session,
    scoped: scoped_session[Session],
) -> None:
    for transaction in (file, plain, with_other_rows, connection, session, scoped):
        guard.admit_sync(transaction, "a", 1)
        guard.admit_all_sync(transaction, {"a": 1, "b": 2})
        await guard.admit(transaction, "a", 1)


async def connections_to_mysql(
    plain: asyncmy.connection.Connection,
    of_aiomysql: aiomysql.Connection,
    blocking: pymysql.Connection[pymysql.cursors.Cursor],
    with_other_rows: pymysql.Connection[pymysql.cursors.DictCursor],
) -> None:
    async with locks.multilock("a", "b", fences=[SqlGuard("mysql://app@localhost/app")]) as held:
        for awaited in (plain, of_aiomysql):
            await guard.admit(awaited, "a", 1)
            await guard.admit_all(awaited, held.tokens)
            await guard.raise_in(awaited, "a", 1)
    for connection in (blocking, with_other_rows):
        guard.admit_sync(connection, "a", 1)
        guard.admit_all_sync(connection, {"a": 1, "b": 2})
        await guard.admit(connection, "a", 1)


async def outcomes_of_a_column(
    column: FenceColumn,
    session: AsyncSession,
    blocking: pymysql.Connection[pymysql.cursors.DictCursor],
    cursor: pymysql.cursors.DictCursor,
) -> bool:
    found: bool = await column.written(session, 42, 7, "UPDATE 1")
    return found and column.written_sync(blocking, 42, 7, cursor)
