"""The part of asyncmy that is used, with types, and how a connection is set up: asyncmy has no types of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk._values.drivers import imported_from

with imported_from("mysql", "asyncmy"):
    import asyncmy
    import asyncmy.errors

ServerError: type[Exception] = asyncmy.errors.MySQLError
"""An error of the server, or of the driver; `code_of` returns its number."""

Rows = Sequence[Sequence[Any]]
LOCK_PATIENCE = 1
"""Seconds that a statement waits for a row. Renewals wait behind it, and the server's own default is 50."""
TABLE_PATIENCE = 4
"""Seconds that a statement waits for a table that an operator has locked, or that several clients create."""
READING_PATIENCE = 3
"""Seconds that the server waits for a client in the middle of an answer."""
_SETTINGS = (
    # UNIX_TIMESTAMP meets an hour that comes twice in any other zone, and a text that is too long would be cut.
    # A part of TRADITIONAL alone would make MySQL warn at every connection, which the driver logs.
    # Where each commit begins the next transaction, a statement of its own would not be committed.
    "SET time_zone = '+00:00', sql_mode = 'TRADITIONAL', completion_type = 0, "
    f"innodb_lock_wait_timeout = {LOCK_PATIENCE}, lock_wait_timeout = {TABLE_PATIENCE}, "
    # A client that froze before a large answer would keep its rows locked for a minute.
    f"net_write_timeout = {READING_PATIENCE}"
)
# The driver logs notes, such as that a table exists which another client has created in the same moment. From 11.8 on
# MariaDB warns of the setting that MySQL has. It has the other one from 10.6.16 on.
_WITHOUT_NOTES, _WITHOUT_NOTES_OF_MARIADB = "sql_notes = 0", "note_verbosity = ''"
_UNKNOWN_VARIABLE = 1193
_ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


MysqlDriverConnection: TypeAlias = Any
"""An `asyncmy.Connection`, which runs one text at a time. The driver has no types."""


async def connect(url: MysqlUrl, *, patience: float) -> MysqlDriverConnection:
    """
    Open a connection to the first host of *url*, and set it up.

    The caller bounds the time: asyncmy waits for an answer to its login for ever.

    Raises:
        Exception: the driver's error.
    """
    connection: MysqlDriverConnection = asyncmy.Connection(  # type: ignore[no-untyped-call]
        **url.arguments(), charset="utf8mb4", connect_timeout=patience, autocommit=True
    )
    try:
        await connection.connect()
        notes = _WITHOUT_NOTES_OF_MARIADB if "MariaDB" in connection.get_server_info() else _WITHOUT_NOTES
        try:
            await ask(connection, f"{_SETTINGS}, {notes}")
        except ServerError as error:
            if code_of(error) != _UNKNOWN_VARIABLE:
                raise
            await ask(connection, f"{_SETTINGS}, {_WITHOUT_NOTES}")
        await ask(connection, _ISOLATION)
    except BaseException:
        connection.close()
        raise
    return connection


async def ask(connection: MysqlDriverConnection, text: str) -> list[Rows]:
    """
    Run the statements of *text*, and return the rows of each; a statement that changes rows has none.

    No value stands in a text but numbers and hexadecimal literals, and a '%' in it is only that.
    """
    cursor = connection.cursor()
    await cursor.execute(text)
    answers: list[Rows] = []
    while True:
        answers.append(_Described(await cursor.fetchall(), cursor.description) if cursor.description else ())
        if not await cursor.nextset():
            return answers


class _Described(list[Sequence[Any]]):
    def __init__(self, rows: Rows, description: Rows) -> None:
        super().__init__(rows)
        self.description = description


def columns_of(rows: Rows) -> list[str]:
    """Return the names of the columns of *rows*, which `ask` has returned for a statement that reads."""
    return [column[0] for column in cast("_Described", rows).description]


def code_of(error: BaseException) -> int:
    """Return the number of an error of the server or the driver; 0 for any other error."""
    code = error.args[0] if isinstance(error, ServerError) and error.args else 0
    return code if isinstance(code, int) else 0


def hexadecimal(text: str) -> str:
    """
    Write *text* as a literal that no quoting mode can change: its bytes in UTF-8.

    Raises:
        UnicodeError: *text* has a lone surrogate.
    """
    return f"x'{text.encode().hex()}'"
