"""Deletes the rows that no call asks for again, without waiting for a row that another transaction has locked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fencing_sdk._mysql.driver import Rows
from fencing_sdk._values.clock import TICK
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends.mysql.rows import NOW, SECOND
from fencing_sdk.backends.mysql.session import MysqlSession

_AT_ONCE = 1000
"""Rows of a table that one sweep deletes at most."""
_MESSAGES = 60
"""Seconds after which a message is of no use: its client looks at the table every few seconds."""
_SIGNS = 600
"""Seconds without a sign of life after which waiters are gone for sure. They lost their places long before."""


async def sweep(session: MysqlSession, retention: float | None) -> bool:
    """
    Delete locks that have been free for *retention* seconds, and what is left of clients that were killed.

    None: no locks. A counter starts again when the row of its lock is gone, so one that another client has written
    stays. Hybrid tokens keep growing, and one that is ahead of the clock stays until the clock has passed it. Return
    whether there are more rows.

    Raises:
        Exception: the driver's error.
    """
    dead = f"since < {_ago(_SIGNS)} AND waiter_group NOT IN (SELECT waiter_group FROM fencing_sign)"  # noqa: S608
    hybrid = f"(token = 0 OR token >= {rules.FIRST_HYBRID})"
    free = f"held_until < {_ago(retention or 0.0)} AND token * {TICK} < {NOW} AND {hybrid}"
    locks = [] if retention is None else [("fencing_lock", "name", free)]
    most = 0
    for table, key, old in (
        *locks,
        ("fencing_revoked", "name, owner", f"until < {NOW}"),
        ("fencing_bell", "id", f"sent < {_ago(_MESSAGES)}"),
        ("fencing_sign", "waiter_group", f"seen < {_ago(_SIGNS)}"),
        ("fencing_waiter", "number", dead),
    ):
        (found,) = await session.ask(f"SELECT {key} FROM {table} WHERE {old} LIMIT {_AT_ONCE}")  # noqa: S608
        most = max(most, len(found))
        if found:
            among = f"({key}) IN ({', '.join(map(_row, found))}) AND {old}"
            unlocked = f"SELECT {key} FROM {table} WHERE {among} FOR UPDATE SKIP LOCKED"  # noqa: S608
            await session.transact([unlocked], partial(_delete, table, key))
    return most == _AT_ONCE


async def _delete(table: str, key: str, answers: Sequence[Rows]) -> tuple[list[str], None]:
    """Delete row by row: for one statement the server may read the whole table, and wait for the rows of others."""
    (free,) = answers
    columns = key.split(", ")
    rows = [[f"{column} = {_literal(value)}" for column, value in zip(columns, row, strict=True)] for row in free]
    return [f"DELETE FROM {table} WHERE {' AND '.join(row)}" for row in rows], None  # noqa: S608


def _row(values: Sequence[Any]) -> str:
    return f"({', '.join(map(_literal, values))})"


def _literal(value: int | bytes) -> str:
    return f"{value:d}" if isinstance(value, int) else f"x'{value.hex()}'"


def _ago(seconds: float) -> str:
    return f"{NOW} - {int(seconds * SECOND):d}"
