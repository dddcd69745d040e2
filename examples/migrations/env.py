"""
Alembic's env.py: `alembic upgrade head` in many processes at once, of which one migrates while the others wait.

DATABASE_URL names the database, as SQLAlchemy writes it. FENCING_URL names the locks: the same database or another one.
"""

import os

from alembic import context
from sqlalchemy import MetaData, create_engine, pool

from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.sync import connect

NAME = "migrations/shop"
target_metadata = MetaData()  # yours: Base.metadata
guard = SqlGuard()


def is_ours(name: str | None, kind: str, _: object) -> bool:
    """Hide the tables of locks and fences from `alembic revision --autogenerate`, which would drop them."""
    return kind != "table" or not (name or "").startswith("fencing_")


def run_migrations_online() -> None:
    engine = create_engine(os.environ["DATABASE_URL"], poolclass=pool.NullPool)
    with (
        connect() as locks,
        locks.lock(NAME, ttl=15, wait=600) as lease,  # the others wait here
        engine.connect() as connection,  # the transaction is inside of the lock
    ):
        context.configure(
            connection=connection,
            target_metadata=target_metadata,
            include_name=is_ours,
            transactional_ddl=True,  # SQLite, too: all revisions are committed together, or none is
        )
        with context.begin_transaction():
            guard.admit_sync(connection, NAME, lease.token)  # first: then Alembic reads which revisions are missing
            context.run_migrations()


run_migrations_online()
