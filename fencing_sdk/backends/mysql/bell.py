"""
The bell of a client: a connection that sleeps in a statement until another client interrupts it with KILL QUERY.

1. The client runs ``SELECT SLEEP(...)``, with its name in a comment. That text, in the server's list of processes, is
   all the registration there is: nothing is stale after a crash or a failover.
2. Who has a message writes it into the table ``fencing_bell``, in the transaction that frees the lock. After the
   commit it looks for the sleeping statement, and interrupts it.
   A message for all has no client. It stays there for a minute at least, and each client notes which ones it has read.
3. The client reads its messages, deletes them, and sleeps again once a look has found none. An interruption that comes
   late may hit another statement of the same connection; it is no more than a ring there.
4. A message may be written between the look and the sleep. On MariaDB the sleep itself looks first. On MySQL it names
   no table: FLUSH TABLES WITH READ LOCK would wait until the sleep has closed it, and every write of the server behind
   that. So a client that rings on MySQL looks again if it has found no sleep. Look and sleep are not sent in one text:
   a client whose text is interrupted between two statements may wait for an answer for ever.

A client sees and interrupts the connections of its own user only, and none through a proxy that numbers connections
by itself. Waiters that cannot be reached try once a second, and holders notice a revocation when they renew.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from fencing_sdk._mysql.driver import Rows, ServerError, code_of, hexadecimal
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.row_backend import random_text
from fencing_sdk.backends.mysql.connection import MysqlSession

OnMessage = Callable[[str], object]

NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
"""When the statement began: not before the rows were locked, because a statement that waits for one reads no time."""

_SLEEP = 5
"""Seconds of one sleep."""
_PAUSES = (0.0, 0.005, 0.03)
"""Seconds before each look for a sleep, which may be about to begin."""
_PATIENCE = 5.0
"""Seconds until a client that wants to hear of revocations learns that the server does not answer."""
_INTERRUPTED = {1317, 1969, 3024}
"""Errors of a statement that KILL QUERY ended, or a limit of the server: in MariaDB, in MySQL."""
_OFF = {0, "0", "OFF"}
_SILENCE = 5.0
"""Seconds beyond its sleep after which a connection without an answer is given up: no packet comes through it."""
_KNOWN = 16
"""Messages to all that may be committed in another order than that of their numbers."""
_LAST_PAUSE = 15.0
"""Seconds between two attempts to connect while the server does not answer; the first ones are faster."""
_PROCESSES = "SELECT id, info FROM {}.processlist WHERE id = CONNECTION_ID() OR info LIKE 'SELECT SLEEP(%'"
_CLIENT = re.compile(r"/\* fencing_sdk bell ([0-9a-f]{32}) \*/")


class Bell:
    """The bell of one backend object in the running event loop."""

    def __init__(self, dial: Callable[[], Awaitable[MysqlSession]]) -> None:
        self.client = random_text()
        self._owner = LoopOwner()
        self._dial = dial
        self._listeners: dict[OnMessage, None] = {}
        self._session: MysqlSession | None = None
        self._opened = asyncio.Event()
        """Set while a connection is open on which no message to all is missed; and for a moment where none arrives."""
        self._direct = True
        self._task = BackgroundTask()

    @property
    def usable(self) -> bool:
        """True if this loop of this process owns it: not in a forked child, and not in the next loop."""
        return self._owner.is_current

    def hear(self, on_message: OnMessage) -> BellBox:
        """Pass every message on, until the box is closed; an empty one after messages may have been lost."""
        self._listeners[on_message] = None
        self._task.start(self._listen)
        return BellBox(self, on_message)

    async def opened(self) -> bool:
        """
        Wait until others can ring; return whether they can at all.

        Raises:
            TimeoutError: no connection could be opened for seconds.
        """
        async with asyncio.timeout(_PATIENCE):
            await self._opened.wait()
        return self._direct

    def stop_hearing(self, on_message: OnMessage) -> None:
        """Pass no more messages on to *on_message*."""
        self._listeners.pop(on_message, None)

    async def aclose(self) -> int | None:
        """Close the connection. Return the server's number of it, if it still sleeps there."""
        self._listeners.clear()
        session = self._session
        await self._task.aclose()
        return None if session is None else session.number

    async def _listen(self) -> None:
        pause, again = 0.5, False
        while self._listeners:
            try:
                self._session = await self._dial()
                self._direct = self._session.direct
                if not self._direct:
                    self._opened.set()
                    return
                pause = 0.5
                await self._pass_on(self._session, again=again)
            except Exception:  # noqa: BLE001  (until the next attempt, waiters try by themselves)
                pause = min(pause * JITTER.uniform(1.5, 2.0), _LAST_PAUSE)
            finally:
                again = again or self._opened.is_set()
                self._opened.clear()
                if self._session is not None:
                    self._session.drop()
                    self._session = None
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))

    async def _pass_on(self, session: MysqlSession, *, again: bool) -> None:
        with suppress(ServerError):
            await session.ask(f"SET long_query_time = {10 * _SLEEP}")  # a sleep is no entry of the log of slow queries
        (earlier,) = await session.ask("SELECT id FROM fencing_bell WHERE client = ''")
        known = [number for (number,) in earlier]
        self._opened.set()
        if again:  # messages to all came in the meantime
            self._notify("")
        read = list[str]()
        while self._listeners:
            look = f"SELECT id, client, message {self._news(known)} ORDER BY id"
            messages = await _unless_interrupted(session, *read, look)
            if messages is None:
                continue
            for _, _, text in messages:
                self._notify(text.decode())
            known += [number for number, client, _ in messages if not client]
            numbers = ", ".join(f"{number:d}" for number, client, _ in messages if client)
            read = [f"DELETE FROM fencing_bell WHERE id IN ({numbers})"] if numbers else []  # noqa: S608
            if messages:
                continue
            seconds = f"IF(EXISTS(SELECT 1 {self._news(known)}), 0, {_SLEEP})" if session.is_mariadb else f"{_SLEEP}"
            columns = "".join(f", @@GLOBAL.{name}" for name in session.read_only_settings)
            sleep = f"SELECT SLEEP({seconds}){columns} /* fencing_sdk bell {self.client} */"
            for _, *settings in await _unless_interrupted(session, sleep) or ():
                if not _OFF.issuperset(settings):
                    return  # others ring at the server that takes writes

    def _news(self, known: list[int]) -> str:
        """Where the messages are that this client has not read. Of those to all, *known* are the ones that it has."""
        known[:] = sorted(known)[-_KNOWN:]
        others = f" AND id > {known[0]:d} AND id NOT IN ({', '.join(map(str, known))})" if known else ""
        return f"FROM fencing_bell WHERE client = {hexadecimal(self.client)} OR client = ''{others}"

    def _notify(self, text: str) -> None:
        for listener in tuple(self._listeners):
            listener(text)


class BellBox:
    """Where messages for a client arrive: see `fencing_sdk.backends._shared.row_backend.MessageBox`."""

    def __init__(self, bell: Bell, on_message: OnMessage) -> None:
        self._bell = bell
        self._on_message = on_message

    @property
    def name(self) -> str:
        """The name of this client in the texts of its sleep, and in messages for it."""
        return self._bell.client

    def close(self) -> None:
        """Receive no more."""
        self._bell.stop_hearing(self._on_message)


def message(clients: Collection[str], text: str) -> str:
    """Leave a message for each of the *clients*: `ring` or their next look brings it."""
    rows = ", ".join(f"({hexadecimal(client)}, {hexadecimal(text)}, {NOW})" for client in clients)
    return f"INSERT INTO fencing_bell (client, message, sent) VALUES {rows}"  # noqa: S608


async def ring(session: MysqlSession, clients: Collection[str] | None = None) -> None:
    """Interrupt the sleep of the *clients* for whom a message was written; None: of all."""
    rung = set[str]()
    for pause in _PAUSES[: 1 if session.is_mariadb else None]:
        if clients is not None and rung.issuperset(clients):
            return
        await asyncio.sleep(pause)
        for number, client in await _sleepers(session):
            if client not in rung and (clients is None or client in clients):
                rung.add(client)
                await _interrupt(session, number)


async def ring_all(session: MysqlSession, text: str) -> None:
    """Write a message for all clients, and interrupt the sleep of each."""
    await session.ask(message([""], text))
    await ring(session)


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
