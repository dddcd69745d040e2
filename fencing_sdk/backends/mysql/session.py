"""
One open connection, and what a transaction on it is.

A transaction has two texts of several statements, so two round trips. Between them, and in the middle of the second,
the server ends the connection after `PAUSE` seconds of silence: otherwise a client that froze there would keep its rows
locked for eight hours. A service between that refuses several statements in one text gets them one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from fencing_sdk._mysql import driver
from fencing_sdk._mysql.driver import MysqlDriverConnection, Rows, code_of
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError, keep_in_children
from fencing_sdk.backends.mysql.errors import GONE

T = TypeVar("T")

PAUSE = 3
"""Seconds of silence within a transaction after which the server rolls it back."""
_IDLE = 28800
"""Seconds of silence outside of a transaction, as the servers have it by default."""
_CLOSE_PATIENCE = 0.5
_ENDED = {0, *GONE}
_OF_THE_DRIVER = range(2000, 3000)


class MysqlSession:
    """
    One open connection, which runs one request at a time.

    Args:
        connection: An open connection of the driver.

        together: Whether it takes several statements in one text.

        direct: Whether the number of the connection is the server's own. A proxy numbers connections by itself, so a
            KILL through it may reach another one.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_connection",
        "_ended",
        "_idle",
        "_reading",
        "_together",
        "abandoned",
        "committing",
        "direct",
    )

    def __init__(self, connection: MysqlDriverConnection, *, together: bool, direct: bool) -> None:
        self._connection = connection
        self._together = together
        self.direct = direct
        self.committing = False
        """True while a text is under way that may have committed."""
        self.abandoned = False
        """True if a caller gave up, and not the server."""
        self._ended = False
        self._reading: asyncio.Future[list[Rows]] | None = None
        self._begin, self._idle = ["START TRANSACTION"], list[str]()
        if not self.is_mariadb:  # MySQL has no limit of its own for a transaction that is silent
            self._begin.insert(0, f"SET wait_timeout = {PAUSE}")
            self._idle.append(f"SET wait_timeout = {_IDLE}")
        keep_in_children(self)

    @property
    def closed(self) -> bool:
        """True if the connection has ended, as far as the driver knows."""
        return self._ended or not self._connection.connected

    @property
    def number(self) -> int:
        """The server's number of the connection, for KILL."""
        return self._connection.thread_id()

    @property
    def is_mariadb(self) -> bool:
        """True for MariaDB, False for MySQL."""
        return "MariaDB" in self._connection.get_server_info()

    async def ask(self, *statements: str) -> list[Rows]:
        """
        Run *statements*, and return the rows of each.

        Raises:
            Exception: the driver's error. A statement after the one that failed did not run.
        """
        try:
            return await self._read_apart(statements)
        except Exception as error:
            if not isinstance(error, driver.ServerError) or has_ended(code_of(error)):
                self._end()
            raise

    async def _read(self, statements: Sequence[str]) -> list[Rows]:
        if self._together:
            return await driver.ask(self._connection, "; ".join(statements))
        return [(await driver.ask(self._connection, statement))[0] for statement in statements]

    async def _read_apart(self, statements: Sequence[str]) -> list[Rows]:
        """
        Read in a task that `drop` can end.

        Closing first sends what is left of a long text, and says good-bye with TLS: a silent server would leave the
        reader waiting.
        """
        self._reading = reading = asyncio.ensure_future(self._read(statements))
        try:
            await asyncio.wait((reading,))
        finally:
            self._reading = None
            reading.cancel()
        if reading.cancelled():
            msg = "the connection was closed while a statement ran"
            raise ConnectionAbandonedError(msg)
        return reading.result()

    async def transact(
        self, first: Sequence[str], work: Callable[[Sequence[Rows]], Awaitable[tuple[Sequence[str], T]]]
    ) -> T:
        """
        Run a transaction: its *first* statements, then *work*, which takes their rows and returns the last ones.

        Without last statements the transaction is rolled back: it has changed nothing.

        Raises:
            Exception: the error of the driver or of *work*. Nothing is changed, unless the session is `committing`.
        """
        try:
            answers = await self.ask(*self._begin, *first)
            last, result = await work(answers[len(self._begin) :])
            if not last:
                await self.ask("ROLLBACK", *self._idle)
                return result
            self.committing = True
            await self.ask(*last, *self._idle, "COMMIT")  # an error is one from before the commit
        except Exception as error:
            if isinstance(error, driver.ServerError) and has_ended(code_of(error)):
                self._end()  # a guard's statement left the connection so
            if not self.closed:  # the server has refused, so nothing is committed
                self.committing = False
                await self._roll_back()
            raise
        except BaseException:
            self._end()
            raise
        self.committing = False
        return result

    async def _roll_back(self) -> None:
        try:
            await self.ask("ROLLBACK", *self._idle)
        except Exception:  # noqa: BLE001  (the server rolls back when the connection ends)
            self._end()

    def for_guards(self) -> MysqlDriverConnection:
        """The driver's connection, on which a guard raises its fence within `transact`."""
        return self._connection

    def drop(self) -> None:
        """Close the connection at once, even while a statement runs."""
        self.abandoned = True
        self._end()
        if self._reading is not None:
            self._reading.cancel()

    async def aclose(self) -> None:
        """Close the connection with a message to the server, within half a second."""
        with suppress(Exception):  # the connection must end, whichever error the driver raised
            async with asyncio.timeout(_CLOSE_PATIENCE):
                await self._connection.ensure_closed()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._connection.close()


def has_ended(code: int) -> bool:
    """Return whether an error with this number leaves a connection that cannot be used. The driver gives many none."""
    return code in _ENDED or code in _OF_THE_DRIVER
