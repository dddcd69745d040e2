"""Deletes the rows that no call asks for again, without waiting for a row that another transaction has locked."""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._mysql.driver import Rows, hexadecimal
from fencing_sdk.backends.mysql.rows import NOW, SECOND, read_names
from fencing_sdk.backends.mysql.session import MysqlSession

_AT_ONCE = 1000
"""Locks that one sweep deletes at most."""
_MESSAGES = 60
"""Seconds after which a message is of no use: its client looks at the table every few seconds."""
_SIGNS = 600
"""Seconds without a sign of life after which waiters are gone for sure. They lost their places long before."""


async def sweep(session: MysqlSession, retention: float) -> None:
    """
    Delete locks that have been free for *retention* seconds, and what is left of clients that were killed.

    Only for hybrid tokens, which keep growing when the row of a lock is gone.

    Raises:
        Exception: the driver's error.
    """
    old = f"held_until < {_ago(retention)}"
    (found,) = await session.ask(f"SELECT name FROM fencing_lock WHERE {old} LIMIT {_AT_ONCE}")  # noqa: S608
    if found:
        await session.transact([f"{_locks(found)} AND {old} FOR UPDATE SKIP LOCKED"], _delete_locks)
    await session.ask(
        f"DELETE FROM fencing_revoked WHERE until < {NOW}",  # noqa: S608
        f"DELETE FROM fencing_bell WHERE sent < {_ago(_MESSAGES)}",  # noqa: S608
        f"DELETE FROM fencing_sign WHERE seen < {_ago(_SIGNS)}",  # noqa: S608
        "DELETE FROM fencing_waiter WHERE waiter_group NOT IN (SELECT waiter_group FROM fencing_sign)"  # noqa: S608
        f" AND since < {_ago(_SIGNS)}",
    )


async def _delete_locks(answers: Sequence[Rows]) -> tuple[list[str], None]:
    (free,) = answers
    return [f"DELETE {_locks(free).removeprefix('SELECT name ')}"] if free else [], None


def _locks(names: Rows) -> str:
    return f"SELECT name FROM fencing_lock WHERE name IN ({', '.join(map(hexadecimal, read_names(names)))})"  # noqa: S608


def _ago(seconds: float) -> str:
    return f"{NOW} - {int(seconds * SECOND):d}"
