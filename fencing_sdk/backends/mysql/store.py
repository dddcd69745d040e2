"""
The server, and steps on it: each is one transaction of two texts on the row of its name.

The first text locks the row of the name and reads the line, the rules of `fencing_sdk.abc.line` run on that, and the
second text writes what has changed, and commits.

The row is locked by a reading that passes over what another transaction has locked, so one name whose row is held up
does not hold up the others on the connection for all calls. A call for a row that is locked waits for it on another
connection, behind its kind. The statement that waits is an upsert, because ``INSERT IGNORE`` takes a shared lock first:
two sessions that do so often end in a deadlock. A keep waits for a moment, on a third connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeVar

from fencing_sdk._mysql.driver import LOCK_PATIENCE, Rows, ServerError, code_of
from fencing_sdk._values.clock import TICK, BootClock
from fencing_sdk.abc.line import Line, TokenSource
from fencing_sdk.backends._shared.request_queue import SILENCE, QueuedRequest, RequestConnection
from fencing_sdk.backends._shared.tokens import token_source
from fencing_sdk.backends.mysql import lines
from fencing_sdk.backends.mysql.bell import messages, ring
from fencing_sdk.backends.mysql.connection import MysqlDialer, MysqlSession
from fencing_sdk.backends.mysql.errors import (
    GONE,
    LOCK_WAIT,
    LOCKED,
    NO_TABLE,
    READ_ONLY,
    ROLLED_BACK,
    locked,
    translating,
)
from fencing_sdk.backends.mysql.lines import NameLine

T = TypeVar("T")
Rule = Callable[[Line, float], T]

_MOST_NAMES = 1000
"""Names that are kept, at most, for which calls have waited in vain, or which had more than one ticket."""
_PARTS = 100
"""Names whose tickets one statement reads."""
_CLOCK = BootClock()


class RowTakenError(Exception):
    """Another transaction has locked the row of the name."""


class MysqlStore:
    """
    A server, and the lines in it.

    Args:
        dialer: Opens connections.

        hybrid: Whether tokens follow the clock.
    """

    def __init__(self, dialer: MysqlDialer, *, hybrid: bool) -> None:
        self.dialer = dialer
        self.hybrid = hybrid
        self._given_up: dict[str, float] = {}
        """Beginning of the last wait in vain for the row of a name."""
        self.crowded: dict[str, None] = {}
        """Names whose lines had more than one ticket when they were last seen."""
        self.connection = RequestConnection(dialer.dial, adapt)
        self._patient_connection = RequestConnection(dialer.dial, adapt, silence=SILENCE + LOCK_PATIENCE)
        """For calls that wait for rows."""
        self.late_connection = RequestConnection(dialer.dial, adapt)
        """For keeps that wait for rows."""

    @property
    def connected(self) -> bool:
        """True if the connection of the requests is open."""
        return self.connection.connected

    async def ask(self, statement: str) -> Sequence[Rows]:
        """
        Run one statement of its own, and return its rows as the one answer.

        Raises:
            Exception: the driver's error.
        """
        return await self.connection.run(lambda session: session.ask(statement))

    async def run(
        self,
        operation: str,
        name: str,
        rule: Rule[T],
        *owners: str,
        at_once: Callable[[MysqlSession], Awaitable[tuple[T] | None]] | None = None,
        reason: str | None = None,
        surely: bool = False,
    ) -> T:
        """
        Run a *rule* on the line of a name.

        Args:
            operation: The name of the operation, for errors.

            name: The name.

            rule: Reads and changes a line. It may run more than once.

            owners: Those whose tickets it asks for, and for whom no bell rings.

            at_once: Tried first. It answers None if the rule has to run.

            reason: What the bells of tickets say that *rule* returns as ended.

            surely: Run it even if the caller gives up before.

        Raises:
            BackendError: the server did not answer, or refused.
        """
        step = partial(self.step, name, rule, owners, reason=reason)

        async def body(session: MysqlSession) -> T | QueuedRequest[MysqlSession]:
            if at_once is not None and (known := await at_once(session)) is not None:
                return known[0]
            try:
                return await step(session)
            except RowTakenError:
                wait = partial(self._wait, operation, name, step, _CLOCK.now(), lambda: surely or not gone)
                return self._patient_connection.put(wait, urgent=surely, must_run=surely)

        gone = False
        try:
            with translating(operation):
                answer = await self.connection.run(body, urgent=surely, must_run=surely)
                if isinstance(answer, QueuedRequest):
                    answer = await self._patient_connection.answer_to(answer)
        except asyncio.CancelledError:
            gone = True
            raise
        return answer

    async def step(
        self,
        name: str,
        rule: Rule[T],
        owners: Collection[str],
        session: MysqlSession,
        *,
        reason: str | None = None,
        waits: bool = False,
        wanted: Callable[[], bool] = lambda: True,
    ) -> T:
        """
        Run a rule in one transaction that holds the row of its name; then ring for those who hold by it.

        Raises:
            RowTakenError: another transaction has locked the row, and this one does not wait; or the answer is not
                *wanted* when the row is locked at last.
        """
        news: list[tuple[str, str]] = []
        texts = [lines.wait_for(name), lines.heads([name])] if waits else [lines.head(name)]
        texts.append(lines.tickets({name: owners}))

        async def work(answers: Sequence[Rows]) -> tuple[list[str], T]:
            if waits:
                answers = answers[1:]
            elif not answers[0]:  # another transaction has locked the row, or there is none yet
                answers = await _created(session, name, texts)
            if not answers[0] or not wanted():
                raise RowTakenError
            found, result = await self._run(session, name, rule, answers)
            self._note(name, crowded=found.crowded)
            news[:] = lines.news(found.line.rung, owners)
            if reason is not None:
                news.extend(lines.news_of_end(result, reason))  # type: ignore[arg-type]
            return [*found.changes(), *messages(news)], result

        result, _ = await session.transact(texts, work)
        if news:
            with suppress(Exception):  # the step is carried out; a ticket whose bell does not ring is kept all the same
                await ring(session, {client for client, _ in news})
        return result

    async def _run(
        self, session: MysqlSession, name: str, rule: Rule[T], answers: Sequence[Rows]
    ) -> tuple[NameLine, T]:
        """Run a rule on what was read. If all of these tickets hold, read the others, and run it once more."""
        (row,), tickets = answers
        found = NameLine(name, row, tickets, self._tokens)
        result = await self._pass_over(session, found, rule)
        if not found.enough:
            (tickets,) = await session.ask(lines.tickets({name: ()}, whole=True))
            found = NameLine(name, row, tickets, self._tokens, whole=True)
            result = await self._pass_over(session, found, rule)
        return found, result

    @staticmethod
    async def _pass_over(session: MysqlSession, found: NameLine, rule: Rule[T]) -> T:
        """Run a rule, which passes over the dead: lock these before, except those that their owners keep just now."""
        if dead := found.dead:
            (surely,) = await session.ask(lines.dead(found.name, dead))
            found.spare({*dead} - {number for (number,) in surely})
        return found.run(rule)

    async def _wait(  # noqa: PLR0917  (a partial function gives all but the session)
        self,
        operation: str,
        name: str,
        step: Callable[..., Awaitable[T]],
        since: float,
        wanted: Callable[[], bool],
        session: MysqlSession,
    ) -> T:
        """
        Run a step that waits for its row. Each wait may take a second, so one in vain is the answer to all before it.

        Its caller began to wait at *since*, and has given up once *wanted* returns false.

        Raises:
            BackendUnavailableError: another call has waited in vain meanwhile.
            RowTakenError: the answer is not wanted.
        """
        if not wanted():
            raise RowTakenError
        if since < self._given_up.get(name, -math.inf):
            raise locked(operation)
        began = _CLOCK.now()
        try:
            answer = await step(session, waits=True, wanted=wanted)
        except ServerError as error:
            if code_of(error) == LOCK_WAIT:
                if len(self._given_up) >= _MOST_NAMES:
                    self._given_up.clear()
                self._given_up[name] = began
            raise
        self._given_up.pop(name, None)
        return answer

    def _tokens(self, micros: int) -> TokenSource:
        return token_source("hybrid" if self.hybrid else "counter", lambda: micros // TICK)

    def _note(self, name: str, *, crowded: bool) -> None:
        if not crowded:
            self.crowded.pop(name, None)
        else:
            if len(self.crowded) >= _MOST_NAMES:
                self.crowded.clear()
            self.crowded[name] = None

    async def look(
        self, session: MysqlSession, owners: Mapping[str, Collection[str]], *, whole: bool = False
    ) -> Mapping[str, NameLine]:
        """Read lines as they were committed: the first tickets of each name, and those of these owners."""
        names = list(owners)
        parts = [{name: owners[name] for name in names[at : at + _PARTS]} for at in range(0, len(names), _PARTS)]
        rows, *tickets = await session.ask(lines.heads(owners), *(lines.tickets(part, whole=whole) for part in parts))
        known, found = {row[1]: row for row in rows}, dict[bytes, list[Sequence[object]]]()
        empty = [rows[0][0], None, *[0] * (len(rows[0]) - 2)]
        for ticket in chain.from_iterable(tickets):
            found.setdefault(ticket[0], []).append(ticket)
        return {
            name: NameLine(name, known.get(key, empty), found.get(key, ()), self._tokens, whole=whole)
            for name, key in ((name, name.encode()) for name in owners)
        }

    async def aclose(self) -> None:
        """Close the connections. The first one may still send requests to the others."""
        for each in (self.connection, self._patient_connection, self.late_connection):
            await each.aclose()


def adapt(session: MysqlSession, error: Exception) -> bool:
    """
    Return whether a request surely did nothing and may succeed if it runs again at once.

    1. The server rolled the transaction back: run it again as it is.
    2. The connection had ended before the text that commits: connect anew.
    3. A table is missing: connect anew, which creates it.
    4. The server became read-only: connect anew for the next request. This one fails, because it was refused.
    """
    code = code_of(error)
    if code in ROLLED_BACK:
        return True
    if code == NO_TABLE or code in READ_ONLY:
        session.drop()
        return code == NO_TABLE
    return code in GONE and not session.committing and not session.abandoned


async def _created(session: MysqlSession, name: str, texts: Sequence[str]) -> Sequence[Rows]:
    """Create the row of *name*, and lock it, unless another transaction has locked or created it."""
    try:
        _, _, *answers = await session.ask(*lines.create(name), *texts)
    except ServerError as error:
        if code_of(error) not in LOCKED:
            raise
        raise RowTakenError from error
    return answers
