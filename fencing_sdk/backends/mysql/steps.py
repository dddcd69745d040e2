"""
What is run on one session: rules, each in a transaction of two texts that holds the row of its name: see `rows`.

A step takes its row if no other transaction has locked it. It waits for the row only where its caller can wait.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeVar

from fencing_sdk._mysql.driver import Rows as Answer
from fencing_sdk._mysql.driver import ServerError, code_of
from fencing_sdk._values.clock import TICK, BootClock
from fencing_sdk.backends._shared.row_backend import Step
from fencing_sdk.backends._shared.rules import TokenSource, token_source
from fencing_sdk.backends.mysql import rows
from fencing_sdk.backends.mysql.bell import ring
from fencing_sdk.backends.mysql.errors import BACKEND, CODES, LOCK_WAIT, LOCKED
from fencing_sdk.backends.mysql.rows import NameRows, NotReadError, Reading
from fencing_sdk.backends.mysql.session import MysqlSession
from fencing_sdk.errors import BackendError, BackendUnavailableError

T = TypeVar("T")

_GIVEN_UP = 1000
"""So many names for whose rows calls have waited in vain are kept."""
_CLOCK = BootClock()


class RowTakenError(Exception):
    """Another transaction has locked the row of the name."""


class MysqlSteps:
    """
    The steps of one store.

    Args:
        hybrid: Whether tokens follow the clock: see `token_source`.
    """

    def __init__(self, *, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._given_up: dict[str, float] = {}
        """When the last wait in vain for the row of a name began."""

    async def look(self, session: MysqlSession, operation: str, steps: Sequence[Step[T]]) -> list[T]:
        """Run rules that change nothing on what is committed."""

        async def look(reading: Reading) -> list[T]:
            answers = await session.ask(*reading.texts([name for name, _ in steps]))
            rows_of = self.rows_of(reading, answers)
            return [rows_of(name).apply(rule) for name, rule in steps]

        return await lazily(look, operation)

    async def run(
        self,
        session: MysqlSession,
        operation: str,
        step: Step[T],
        *,
        waits: bool = False,
        wanted: Callable[[], bool] = lambda: True,
        before_commit: Callable[[MysqlSession, T], Awaitable[None]] | None = None,
    ) -> T:
        """
        Run a rule in one transaction that holds the row of its name; then wake whom it names.

        Raises:
            RowTakenError: another transaction has locked the row, and this one does not wait; or the answer is not
                *wanted* when the row is locked at last.
        """
        name, rule = step
        woken: set[str] = set()

        async def transact(reading: Reading) -> T:
            free = reading.texts([name], lock_free=True)

            async def work(answers: Sequence[Answer]) -> tuple[list[str], T]:
                if waits:
                    answers = answers[1:]
                elif not answers[0]:  # another transaction has locked the row, or there is none yet
                    answers = await self._created(session, name, free)
                if not answers[0] or not wanted():
                    raise RowTakenError
                found = self.rows_of(reading, answers)(name)
                outcome = found.apply(rule)
                if before_commit is not None:
                    await before_commit(session, outcome)
                    if not wanted():  # it may have waited for a fence
                        raise RowTakenError
                woken.update([] if found.woken is None else [found.woken.box])
                return list(found.changes()), outcome

            return await session.transact([rows.lock(name), *reading.texts([name])] if waits else free, work)

        outcome = await lazily(transact, operation)
        if woken:
            with suppress(Exception):  # the step is carried out; a waiter that is not woken tries by itself
                await ring(session, woken)
        return outcome

    async def wait(
        self,
        operation: str,
        step: Step[T],
        since: float,
        wanted: Callable[[], bool],
        session: MysqlSession,
        *,
        before_commit: Callable[[MysqlSession, T], Awaitable[None]] | None = None,
    ) -> T:
        """
        Run a step that waits for its row. Each wait may take a second, so one in vain is the answer to all before it.

        Args:
            operation: What errors call it.

            step: The rule, and whose row it needs.

            since: When its caller began to wait.

            wanted: Returns false once the caller has given up; asked before the wait and after it.

            session: On which it waits.

            before_commit: What else belongs to the transaction, such as a fence for whose row it waits, too.

        Raises:
            BackendUnavailableError: another call has waited in vain meanwhile.
            RowTakenError: the answer is not wanted.
        """
        name = step[0]
        if not wanted():
            raise RowTakenError
        if since < self._given_up.get(name, -math.inf):
            raise locked(operation)
        began = _CLOCK.now()
        try:
            answer = await self.run(session, operation, step, waits=True, wanted=wanted, before_commit=before_commit)
        except ServerError as error:
            if code_of(error) == LOCK_WAIT:
                self._give_up(name, began)
            raise
        self._given_up.pop(name, None)
        return answer

    def _give_up(self, name: str, began: float) -> None:
        if len(self._given_up) >= _GIVEN_UP:
            self._given_up.clear()
        self._given_up[name] = began

    async def _created(self, session: MysqlSession, name: str, free: Sequence[str]) -> Sequence[Answer]:
        """Create the row of *name*, and lock it, unless another transaction has locked or created it."""
        try:
            _, _, *answers = await session.ask(*rows.create(name), *free)
        except ServerError as error:
            if code_of(error) not in LOCKED:
                raise
            raise RowTakenError from error
        return answers

    def rows_of(self, reading: Reading, answers: Sequence[Answer]) -> Callable[[str], NameRows]:
        """The rows of each name, by the answers to a reading: see `NameRows.of_answers`."""
        return cache(NameRows.of_answers(reading, answers, self._tokens_at, BACKEND))

    def _tokens_at(self, now: float) -> TokenSource:
        return token_source("hybrid" if self._hybrid else "counter", lambda: int(now * rows.SECOND) // TICK)


async def lazily(work: Callable[[Reading], Awaitable[T]], operation: str) -> T:
    """Do *work* without the reasons why grants were ended, and again with them if a rule asks for one."""
    line = operation not in {"renew", "transfer"}
    try:
        return await work(Reading(line=line, reasons=False))
    except NotReadError:
        return await work(Reading(line=line, reasons=True))


def locked(operation: str) -> BackendError:
    """The error of a call whose row another transaction keeps locked."""
    return BackendUnavailableError(BACKEND, operation, CODES[LOCK_WAIT][1])


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of their bytes, in which every client locks them."""
    return sorted(set(names), key=str.encode)
