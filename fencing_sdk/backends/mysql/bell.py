"""
The bell of a client: a connection that sleeps in a statement until another client interrupts it with KILL QUERY.

1. The client runs ``SELECT SLEEP(...)``, with its name in a comment. That text, in the server's list of processes, is
   all the registration there is: nothing is stale after a crash or a failover. Each ticket names its client.
2. The transaction by which a ticket holds, or is ended, writes a message into the table ``fencing_bell``. After the
   commit its client looks for the sleeping statement, and interrupts it.
3. The client reads its messages, deletes them, and sleeps again once a look has found none. An interruption that comes
   late may hit another statement of the same connection; it is no more than a ring there.
4. A message may be written between the look and the sleep. On MariaDB the sleep itself looks first. On MySQL it names
   no table: FLUSH TABLES WITH READ LOCK would wait until the sleep has closed it, and every write of the server behind
   that. So a client that rings on MySQL looks again if it has found no sleep. Look and sleep are not sent in one text:
   a client whose text is interrupted between two statements may wait for an answer for ever.

A client sees and interrupts the connections of its own user only, and none through a proxy that numbers connections
by itself. Tickets of clients that cannot be reached are kept, and learn what happened from the answers.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from fencing_sdk._mysql.driver import Rows, ServerError, code_of, hexadecimal
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.bells import Bells
from fencing_sdk.backends.mysql.connection import NOW, MysqlSession

_SLEEP = 5
"""Seconds of one sleep."""
_PAUSES = (0.0, 0.005, 0.03)
"""Seconds before each look for a sleep, which may be about to begin."""
_INTERRUPTED = {1317, 1969, 3024}
"""Errors of a statement that KILL QUERY ended, or a limit of the server: in MariaDB, in MySQL."""
_OFF = {0, "0", "OFF"}
_SILENCE = 5.0
"""Seconds beyond its sleep after which a connection without an answer is given up: no packet comes through it."""
_LAST_PAUSE = 15.0
"""Seconds between two attempts to connect while the server does not answer; the first ones are faster."""
_UNREACHABLE = 60.0
"""Seconds until the next attempt where a proxy numbers the connections."""
_LONGEST = 255
"""Bytes of a message."""
_PROCESSES = "SELECT id, info FROM {}.processlist WHERE id = CONNECTION_ID() OR info LIKE 'SELECT SLEEP(%'"
_CLIENT = re.compile(r"/\* fencing_sdk bell ([0-9a-f]{32}) \*/")


class MysqlBell:
    """
    The connection on which one backend object hears its bells: while one of its tickets waits, or holds for a moment.

    Args:
        dial: Opens a connection.

        bells: What rings.
    """

    def __init__(self, dial: Callable[[], Coroutine[Any, Any, MysqlSession]], bells: Bells) -> None:
        self._dial = dial
        self._bells = bells
        self._owner: LoopOwner | None = None
        self._client = ""
        self._session: MysqlSession | None = None
        self._task = BackgroundTask()

    @property
    def client(self) -> str:
        """The name of this client in its tickets, and in the text of its sleep: another one in each event loop."""
        if self._owner is None or not self._owner.is_current:
            self._owner, self._client = LoopOwner(), uuid.uuid4().hex
            self._session, self._task = None, BackgroundTask()
        return self._client

    def open(self) -> None:
        """Begin to listen, unless listening already, or no bell is left to ring."""
        if self.client and self._bells:
            self._task.start(self._listen_while_needed)

    async def aclose(self) -> int | None:
        """Close the connection. Return the server's number of it, if it still sleeps there."""
        if self._owner is None or not self._owner.is_current:
            return None
        session = self._session
        await self._task.aclose()
        return None if session is None else session.number

    async def _listen_while_needed(self) -> None:
        pause, missed = 0.5, False
        while self._bells:
            try:
                self._session = session = await self._dial()
                pause = 0.5
                if session.direct:
                    await self._listen(session, missed=missed)
                    pause = 0.0
                else:
                    pause = _UNREACHABLE
            except Exception:  # noqa: BLE001  (until the next attempt, tickets are kept all the same)
                pause = min(pause * JITTER.uniform(1.5, 2.0), _LAST_PAUSE)
            finally:
                missed = True
                if self._session is not None:
                    self._session.drop()
                    self._session = None
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))

    async def _listen(self, session: MysqlSession, *, missed: bool) -> None:
        """Listen until the server has become read-only, or no bell is left."""
        with suppress(ServerError):
            await session.ask(f"SET long_query_time = {10 * _SLEEP}")  # a sleep is no entry of the log of slow queries
        if missed:  # messages may have been deleted in the meantime, or are on another server
            self._bells.ring_all()
        news = f"FROM fencing_bell WHERE client = {hexadecimal(self._client)}"
        read = list[str]()
        while self._bells:
            messages = await _unless_interrupted(session, *read, f"SELECT id, message {news} ORDER BY id")
            if messages is None:
                continue
            for _, text in messages:
                self._bells.hear(text.decode())
            numbers = ", ".join(f"{number:d}" for number, _ in messages)
            read = [f"DELETE FROM fencing_bell WHERE id IN ({numbers})"] if numbers else []  # noqa: S608
            if messages:
                continue
            seconds = f"IF(EXISTS(SELECT 1 {news}), 0, {_SLEEP})" if session.is_mariadb else f"{_SLEEP}"
            columns = "".join(f", @@GLOBAL.{name}" for name in session.read_only_settings)
            sleep = f"SELECT SLEEP({seconds}){columns} /* fencing_sdk bell {self._client} */"
            for _, *settings in await _unless_interrupted(session, sleep) or ():
                if not _OFF.issuperset(settings):
                    return  # others ring at the server that takes writes


def messages(news: Iterable[tuple[str, str]]) -> list[str]:
    """Leave each message for its client: `ring`, or the client's next look, brings it."""
    rows = ", ".join(f"({hexadecimal(client)}, {hexadecimal(_short(text))}, {NOW})" for client, text in news)
    return [f"INSERT INTO fencing_bell (client, message, sent) VALUES {rows}"] if rows else []  # noqa: S608


def _short(text: str) -> str:
    """Return a message that fits into its column. The mere key of a ticket says: look."""
    return text if len(text.encode()) <= _LONGEST else text.partition(" ")[0]


async def ring(session: MysqlSession, clients: Collection[str]) -> None:
    """Interrupt the sleep of the *clients* for whom a message was written."""
    rung = set[str]()
    for pause in _PAUSES[: 1 if session.is_mariadb else None]:
        if rung.issuperset(clients):
            return
        await asyncio.sleep(pause)
        for number, client in await _sleepers(session):
            if client not in rung and client in clients:
                rung.add(client)
                await _interrupt(session, number)


async def end(session: MysqlSession, number: int, client: str) -> None:
    """End the connection of a *client* whose socket is closed: the server would notice it after the sleep only."""
    if (number, client) in await _sleepers(session):  # on another server the number is another client's
        with suppress(ServerError):  # it has ended
            await session.ask(f"KILL {number:d}")


async def _sleepers(session: MysqlSession) -> list[tuple[int, str]]:
    if not session.direct:
        return []
    found: Rows = ()
    if not session.is_mariadb:
        try:
            (found,) = await session.ask(_PROCESSES.format("performance_schema"))
        except ServerError:  # before 8.0.22, whatever that server says
            if session.closed:
                raise
    if not found:  # not even this connection: the performance schema is off
        found, _ = await session.ask(_PROCESSES.format("information_schema"), "DO 0")  # of the last one come warnings
    texts = [(number, info.decode() if isinstance(info, bytes) else info) for number, info in found]
    return [(number, match[1]) for number, text in texts if (match := _CLIENT.search(text))]


async def _interrupt(session: MysqlSession, number: int) -> None:
    try:
        await session.ask(f"KILL QUERY {number:d}")
    except ServerError:  # it has ended, or is another user's
        if session.closed:
            raise


async def _unless_interrupted(session: MysqlSession, *statements: str) -> Rows | None:
    try:
        async with asyncio.timeout(_SLEEP + _SILENCE):
            return (await session.ask(*statements))[-1]
    except ServerError as error:
        if code_of(error) not in _INTERRUPTED:
            raise
        return None
