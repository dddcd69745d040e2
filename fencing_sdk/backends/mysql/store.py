"""
The server as a store of rows: each step is one transaction of two texts on the row of its name.

The first text locks the row and reads all that a rule may ask for, into a table in memory. The rule runs on that table.
What it has changed is the second text, which commits. A name that is new costs one text more, which creates its row.

The row is locked by a reading that passes over what another transaction has locked, so one lock whose row is held up
does not hold up the others on the connection for all calls. A call for a row that is locked waits for it on another
connection, behind its kind. The statement that waits is an upsert, because ``INSERT IGNORE`` takes a shared lock first:
two sessions that do so often end in a deadlock. A renewal waits for a moment, on a third connection, and the next
heartbeat tries then.

All values are numbers or hexadecimal literals, so no text of a caller can end a literal.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from fencing_sdk._mysql.driver import LOCK_PATIENCE, ServerError, code_of, hexadecimal
from fencing_sdk._mysql.driver import Rows as Answer
from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal, Revoked, mode_named, permits_of
from fencing_sdk._values.clock import JITTER, TICK, BootClock
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.error_translation import Fences, raise_fences
from fencing_sdk.backends._shared.losses import StopListening
from fencing_sdk.backends._shared.request_queue import SILENCE, QueuedRequest, RequestConnection
from fencing_sdk.backends._shared.row_backend import Step, WaiterAddress
from fencing_sdk.backends._shared.row_table import RowTable, TableRows
from fencing_sdk.backends._shared.rules import GrantRow, Rows, TokenSource, WaiterRow, token_source
from fencing_sdk.backends.mysql.bell import NOW, Bell, BellBox, end, message, ring, ring_all
from fencing_sdk.backends.mysql.connection import MysqlDialer, MysqlSession
from fencing_sdk.backends.mysql.errors import (
    BACKEND,
    GONE,
    LOCK_WAIT,
    LOCKED,
    NO_TABLE,
    READ_ONLY,
    ROLLED_BACK,
    locked,
    translated,
    translating,
)
from fencing_sdk.errors import BackendError

T = TypeVar("T")
_Renewed = Renewal | Revoked | BackendError

SECOND = 1_000_000
"""Microseconds, in which the server's tables count time."""
PAGE = 10_000
"""Names that one statement of a listing looks at: renewals wait for it."""
_raise_fences = partial(raise_fences, backend=BACKEND, code_of=code_of, missing={NO_TABLE, 1054, 1142, 1143})
_GIVEN_UP = 1000
"""So many names for whose rows calls have waited in vain are kept."""
_ROW_PAUSE = 0.02
"""Seconds after which a renewal looks once more for a row that another transaction keeps locked."""
_ROW_PATIENCE = 0.2
"""Seconds for which it then waits among the others that want the row, if the ttl is not short."""
_END_PATIENCE = 0.5
_CLOCK = BootClock()


class RowTakenError(Exception):
    """Another transaction has locked the row of the name."""


# The rows of a name as texts


_COLUMNS = "(name, token, held_until, grants)"


def lock(name: str) -> str:
    """Wait for the row of *name*, and lock it; create it if it is missing."""
    row = f"({hexadecimal(name)}, 0, {NOW}, '[]')"
    return f"INSERT INTO fencing_lock {_COLUMNS} VALUES {row} ON DUPLICATE KEY UPDATE token = token"  # noqa: S608


class NotReadError(Exception):
    """A rule asks why a grant was ended, and that was not read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The statements that read the rows of names, in this order: locks, waiters, reasons."""

    line: bool
    """True if the rule asks for the waiters."""
    reasons: bool
    """True if it asks why grants were ended, which is rare. Without them it raises `NotReadError`."""

    def texts(self, names: Iterable[str], *, lock_free: bool = False) -> list[str]:
        """
        Read the rows of *names*, for `NameRows.of_answers`.

        Args:
            names: One at least.

            lock_free: Lock the rows of the names that no other transaction has locked, and read those alone.
        """
        among = f"IN ({', '.join(map(hexadecimal, names))})"
        if lock_free:
            source = f"fencing_lock WHERE name {among} FOR UPDATE SKIP LOCKED"
        else:  # a row with the time, also where no name is known
            source = f"(SELECT 1) AS always LEFT JOIN fencing_lock ON name {among}"
        texts = [f"SELECT {NOW}, name, token, grants FROM {source}"]  # noqa: S608  (hexadecimal)
        if self.line:
            texts.append(
                "SELECT name, owner, fencing_waiter.waiter_group, box, ticket, mode, permits, since, label, seen"  # noqa: S608
                " FROM fencing_waiter LEFT JOIN fencing_sign ON fencing_sign.waiter_group = fencing_waiter.waiter_group"
                f" WHERE name {among} ORDER BY number"
            )
        if self.reasons:
            texts.append(f"SELECT name, owner, until, reason FROM fencing_revoked WHERE name {among}")  # noqa: S608
        return texts


class _Unread(dict[tuple[str, str], tuple[float, str]]):
    def get(self, *_: object) -> NoReturn:
        raise NotReadError


class NameRows:
    """The rows of one name as they were read, and the changes of the rule that runs on them."""

    def __init__(self, table: RowTable, name: str, now: float) -> None:
        self._table = table
        self._name = name
        self._now = now
        self.rows = TableRows(table, name, now)
        self._token = table.last_token
        self._held = self._grants_text()
        self._waiting = set(table.lines.get(name, ()))
        self._reasons = dict(table.reasons)

    @classmethod
    def of_answers(
        cls, reading: Reading, answers: Sequence[Answer], tokens: Callable[[float], TokenSource], backend: str
    ) -> Callable[[str], NameRows]:
        """Take the *answers* to a *reading*; return the rows of any of the names, the same ones for equal names."""
        rest = iter(answers)
        locks = next(rest, ())
        waiters, ended = next(rest, ()) if reading.line else (), next(rest, ()) if reading.reasons else ()
        now = int(locks[0][0]) / SECOND if locks else math.nan
        known = {_text(name): (token, grants) for _, name, token, grants in locks if name is not None}
        lines: dict[str, OrderedDict[str, WaiterRow]] = {}
        for name, waiter in map(_waiter, waiters):
            lines.setdefault(name, OrderedDict())[waiter.owner] = waiter
        why = {(_text(name), _text(owner)): (until / SECOND, _text(text)) for name, owner, until, text in ended}

        made: dict[str, NameRows] = {}  # no cache of functools: it takes a `LockName` for another key than its text

        def rows_of(name: str) -> NameRows:
            if (of := made.get(name)) is not None:
                return of
            token, grants = known.get(name, (0, "[]"))
            table = RowTable(tokens(now), backend)
            table.last_token = token
            if held := {row.owner: row for row in map(_grant, json.loads(grants))}:
                table.grants[name] = held
            if name in lines:
                table.lines[name] = lines[name]
            table.reasons = {key: kept for key, kept in why.items() if key[0] == name} if reading.reasons else _Unread()
            made[name] = cls(table, name, now)
            return made[name]

        return rows_of

    @property
    def woken(self) -> WaiterAddress | None:
        """The waiter that the rule wakes, if it can be reached."""
        waiter = self.rows.woken
        address = None if waiter is None else waiter.address
        return address if isinstance(address, WaiterAddress) and address.box else None

    def changes(self) -> Iterator[str]:
        """The statements that write what the rule has changed."""
        name, micros = hexadecimal(self._name), int(self._now * SECOND)
        held, token = self._grants_text(), self._table.last_token
        if held != self._held or token != self._token:
            ends = [_end_of(row) for row in self._table.grants.get(self._name, {}).values()]
            yield (
                f"UPDATE fencing_lock SET token = {token:d}, held_until = {max(ends, default=micros):d},"  # noqa: S608
                f" grants = {hexadecimal(held)} WHERE name = {name}"
            )
        line: Mapping[str, WaiterRow] = self._table.lines.get(self._name, {})
        for owner in self._waiting - line.keys():
            yield f"DELETE FROM fencing_waiter WHERE name = {name} AND owner = {hexadecimal(owner)}"  # noqa: S608
        for owner in [each for each in line if each not in self._waiting]:  # in the order of the line
            waiter = line[owner]
            address = waiter.address
            assert isinstance(address, WaiterAddress)
            texts = (owner, address.group, address.box, address.ticket, waiter.mode.word)
            permits = "NULL" if (number := permits_of(waiter.mode)) is None else f"{number:d}"
            label = "NULL" if waiter.label is None else hexadecimal(waiter.label)
            yield (
                "INSERT INTO fencing_waiter (name, owner, waiter_group, box, ticket, mode, permits, since, label)"  # noqa: S608
                f" VALUES ({name}, {', '.join(map(hexadecimal, texts))}, {permits}, {micros:d}, {label})"
            )
            yield sign_of_life(address.group)
        for (_, owner), (until, reason) in self._table.reasons.items() - self._reasons.items():
            values = f"{name}, {hexadecimal(owner)}, {math.ceil(until * SECOND):d}, {hexadecimal(reason)}"
            yield f"REPLACE INTO fencing_revoked (name, owner, until, reason) VALUES ({values})"  # noqa: S608
        if (woken := self.woken) is not None:
            yield message([woken.box], woken.ticket)

    def _grants_text(self) -> str:
        return json.dumps([_grant_object(row) for row in self._table.grants.get(self._name, {}).values()])


def sign_of_life(group: str) -> str:
    """Note that a group of waiters lives."""
    return (
        f"INSERT INTO fencing_sign (waiter_group, seen) VALUES ({hexadecimal(group)}, {NOW})"  # noqa: S608
        f" ON DUPLICATE KEY UPDATE seen = {NOW}"
    )


def _waiter(row: Sequence[Any]) -> tuple[str, WaiterRow]:
    name, owner, group, box, ticket, word, permits, since, label, seen = row
    silent_at = (since if seen is None else seen) / SECOND + rules.LINE_TTL
    address = WaiterAddress(_text(box), _text(group), _text(ticket))
    label = None if label is None else _text(label)
    return _text(name), WaiterRow(
        _text(owner), mode_named(_text(word), permits), silent_at, since / SECOND, label, address
    )


def _grant(found: Mapping[str, Any]) -> GrantRow:
    return GrantRow(
        found["owner"],
        found["token"],
        found["expires"] / SECOND,
        mode_named(found["mode"], found.get("permits")),
        found.get("permit"),
        found.get("label"),
        found["since"] / SECOND,
    )


def _grant_object(row: GrantRow) -> dict[str, object]:
    written: dict[str, object | None] = {
        "owner": row.owner,
        "token": row.token,
        "expires": _end_of(row),
        "since": round(row.since * SECOND),
        "mode": row.mode.word,
        "permits": permits_of(row.mode),
        "permit": row.permit,
        "label": row.label,
    }
    return {key: value for key, value in written.items() if value is not None}


def _end_of(grant: GrantRow) -> int:
    """The moment a grant ends, rounded up: the store never frees a lock early."""
    return math.ceil(grant.expires * SECOND)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# What is deleted

_RETENTION = 7 * 86400.0
"""Seconds after which the row of a free lock may be deleted."""
_EVERY = 600.0
"""Seconds between two walks of one client through the tables."""
_SOON = 5.0
"""Seconds until the next sweep where the last one has left rows."""
_AT_ONCE = 1000
"""Rows of a table that one sweep looks at, or deletes, at most: renewals wait for it."""
_MESSAGES = 60
"""Seconds after which a message is of no use: its client looks at the table every few seconds."""
_SIGNS = 600
"""Seconds without a sign of life after which waiters are gone for sure. They lost their places long before."""


class Sweeper:
    """
    Deletes locks that have been free for *retention* seconds, and what is left of clients that were killed.

    It walks through the locks in the order of their names, page by page. An index by their age would cost each renewal
    a write, and without one a table of millions would be read as a whole, while renewals wait.

    Args:
        connection: The one of the renewals, which wait for each sweep.

        retention: None deletes no locks. A counter starts again when the row of its lock is gone, so one that another
            client has written stays. Hybrid tokens keep growing, and one that is ahead of the clock stays until the
            clock has passed it.
    """

    def __init__(self, connection: RequestConnection[MysqlSession], retention: float | None) -> None:
        self._connection = connection
        self._retention = retention
        self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        self.task = BackgroundTask()
        self._after: bytes | None = None
        """The last name of the page before. The first page begins at a name in use: many clients live for minutes."""
        self._from_middle = False
        """True until the end of the table is reached: the names before the first page have not been looked at."""

    def start_if_due(self, name: str) -> None:
        """Sweep in a task, if the last sweep was long ago."""
        if _CLOCK.now() >= self._due:
            if self._after is None:
                self._after, self._from_middle = name.encode(), True
            self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self.task.start(self._run)

    async def _run(self) -> None:
        with suppress(Exception):  # a later sweep deletes the same rows
            if await self._connection.run(self.sweep):
                self._due = _CLOCK.now() + _SOON

    async def sweep(self, session: MysqlSession) -> bool:
        """
        Delete old rows; return whether there are more rows to look at.

        Raises:
            Exception: the driver's error.
        """
        more = self._retention is not None and await self._sweep_locks(session, self._retention)
        dead = f"since < {_ago(_SIGNS)} AND waiter_group NOT IN (SELECT waiter_group FROM fencing_sign)"  # noqa: S608
        for table, key, old in (
            ("fencing_revoked", "name, owner", f"until < {NOW}"),
            ("fencing_bell", "id", f"sent < {_ago(_MESSAGES)}"),
            ("fencing_sign", "waiter_group", f"seen < {_ago(_SIGNS)}"),
            ("fencing_waiter", "number", dead),
        ):
            (found,) = await session.ask(f"SELECT {key} FROM {table} WHERE {old} LIMIT {_AT_ONCE}")  # noqa: S608
            await self._delete(session, table, key, old, found)
            more = more or len(found) == _AT_ONCE
        return more

    async def _sweep_locks(self, session: MysqlSession, retention: float) -> bool:
        hybrid = f"(token = 0 OR token >= {rules.FIRST_HYBRID})"
        old = f"held_until < {_ago(retention)} AND token * {TICK} < {NOW} AND {hybrid}"
        page = f"WHERE name > {_literal(self._after or b'')} ORDER BY name LIMIT {_AT_ONCE}"
        (found,) = await session.ask(f"SELECT name, {old} FROM fencing_lock {page}")  # noqa: S608
        await self._delete(session, "fencing_lock", "name", old, [(name,) for name, is_old in found if is_old])
        at_end = len(found) < _AT_ONCE
        more = not at_end or self._from_middle
        self._from_middle = self._from_middle and not at_end
        self._after = b"" if at_end else found[-1][0]
        return more

    async def _delete(self, session: MysqlSession, table: str, key: str, old: str, found: Answer) -> None:
        if not found:
            return
        keys = ", ".join(f"({', '.join(map(_literal, row))})" for row in found)
        among = f"({key}) IN ({keys}) AND {old}"

        async def deletions(answers: Sequence[Answer]) -> tuple[list[str], None]:
            """Delete row by row: for one statement the server may read the whole table, and wait for others' rows."""
            columns = key.split(", ")
            rows = [
                [f"{column} = {_literal(value)}" for column, value in zip(columns, row, strict=True)]
                for row in answers[0]
            ]
            return [f"DELETE FROM {table} WHERE {' AND '.join(row)}" for row in rows], None  # noqa: S608

        await session.transact([f"SELECT {key} FROM {table} WHERE {among} FOR UPDATE SKIP LOCKED"], deletions)  # noqa: S608


def _literal(value: int | bytes) -> str:
    return f"{value:d}" if isinstance(value, int) else f"x'{value.hex()}'"


def _ago(seconds: float) -> str:
    return f"{NOW} - {int(seconds * SECOND):d}"


# The store


class MysqlStore:
    """A server, as `RowBackend` asks for it: see `RowStore`."""

    def __init__(self, dialer: MysqlDialer, *, hybrid: bool, bell: bool) -> None:
        self.dialer = dialer
        self.hybrid = hybrid
        self._with_bell = bell
        self._given_up: dict[str, float] = {}
        """When the last wait in vain for the row of a name began."""
        self._connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + _ROW_PATIENCE)
        self._patient_connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + LOCK_PATIENCE)
        """For calls that wait for rows."""
        self._late_connection = RequestConnection(dialer.dial, _adapt)
        """For renewals that wait for rows."""
        self._held_up: set[str] = set()
        """The names for whose rows the last renewal waited in vain."""
        self._fenced_connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + 2 * LOCK_PATIENCE)
        """For calls that wait for the row of a lock and for that of a fence."""
        self._bell: Bell | None = None
        self._sweeper = Sweeper(self._connection, _RETENTION if hybrid else None)

    async def open(self) -> None:
        """See `RowStore.open`."""
        with translating("open"):
            await self.ask("DO 0")

    @property
    def connected(self) -> bool:
        """True if the connection of the requests is open."""
        return self._connection.connected

    async def ask(self, statement: str) -> Sequence[Answer]:
        """
        Run one statement of its own, and return its rows as the one answer.

        Raises:
            Exception: the driver's error.
        """
        return await self._connection.run(lambda session: session.ask(statement))

    async def run(
        self,
        operation: str,
        name: str,
        rule: Callable[[Rows], T],
        *,
        look: Callable[[Rows], T | None] | None = None,
        reads: bool = False,
        durable: bool = False,
        surely: bool = False,
    ) -> T:
        """See `RowStore.run`. To inspect a lock, this store does not lock its row: who may only look is answered."""
        if reads or operation == "inspect":
            (seen,) = await self.look(operation, [(name, rule)])
            return seen

        async def body(session: MysqlSession) -> T | QueuedRequest[MysqlSession]:
            if look is not None:
                (known,) = await self._look(session, operation, [(name, look)])
                if known is not None:
                    return known
            try:
                return await self._step(operation, (name, rule), session)
            except RowTakenError:
                wait = partial(self._wait, operation, (name, rule), _CLOCK.now(), lambda: surely or not gone)
                return self._patient_connection.put(wait, urgent=urgent, must_run=surely)

        urgent, gone = operation == "release", False
        try:
            with translating(operation):
                answer = await self._connection.run(body, urgent=urgent, must_run=surely)
                if isinstance(answer, QueuedRequest):
                    answer = await self._patient_connection.answer_to(answer)
        except asyncio.CancelledError:
            gone = True
            raise
        if durable:
            self._sweeper.start_if_due(name)
        return answer

    async def run_fenced(self, claim: Claim, rule: Callable[[Rows], Grant | Busy], fences: Fences) -> Grant | Busy:
        """Run a *rule* that may grant, and raise the fences of a grant in its transaction."""

        async def raise_all(session: MysqlSession, outcome: Grant | Busy) -> None:
            if isinstance(outcome, Grant):
                await _raise_fences(session.for_guards(), claim, fences, outcome.token)

        gone, step = False, (claim.name, rule)
        body = partial(self._wait, "acquire", step, _CLOCK.now(), lambda: not gone, before_commit=raise_all)
        try:
            with translating("acquire"):
                outcome = await self._fenced_connection.run(body)
        except asyncio.CancelledError:
            gone = True
            raise
        self._sweeper.start_if_due(claim.name)
        return outcome

    async def look(self, operation: str, steps: Sequence[Step[T]]) -> Sequence[T]:
        """See `RowStore.look`."""
        if not steps:
            return []
        with translating(operation):
            return await self._connection.run(
                lambda session: self._look(session, operation, steps), urgent=operation == "renew"
            )

    async def _look(self, session: MysqlSession, operation: str, steps: Sequence[Step[T]]) -> list[T]:
        """Run rules that change nothing on what is committed."""

        async def look(reading: Reading) -> list[T]:
            answers = await session.ask(*reading.texts([name for name, _ in steps]))
            rows_of = self._rows_of(reading, answers)
            return [rule(rows_of(name).rows) for name, rule in steps]

        return await _read_as_needed(look, operation)

    async def _step(
        self,
        operation: str,
        step: Step[T],
        session: MysqlSession,
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
        woken: list[str] = []

        async def transact(reading: Reading) -> T:
            free = reading.texts([name], lock_free=True)

            async def work(answers: Sequence[Answer]) -> tuple[list[str], T]:
                if waits:
                    answers = answers[1:]
                elif not answers[0]:  # another transaction has locked the row, or there is none yet
                    answers = await _created(session, name, free)
                if not answers[0] or not wanted():
                    raise RowTakenError
                found = self._rows_of(reading, answers)(name)
                outcome = rule(found.rows)
                if before_commit is not None:
                    await before_commit(session, outcome)
                    if not wanted():  # it may have waited for a fence
                        raise RowTakenError
                woken[:] = [] if found.woken is None else [found.woken.box]
                return list(found.changes()), outcome

            return await session.transact([lock(name), *reading.texts([name])] if waits else free, work)

        outcome = await _read_as_needed(transact, operation)
        if woken:
            with suppress(Exception):  # the step is carried out; a waiter that is not woken tries by itself
                await ring(session, woken)
        return outcome

    async def _wait(
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

        Its caller began to wait at *since*, and has given up once *wanted* returns false. *before_commit* may wait for
        the row of a fence, too.

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
            answer = await self._step(operation, step, session, waits=True, wanted=wanted, before_commit=before_commit)
        except ServerError as error:
            if code_of(error) == LOCK_WAIT:
                if len(self._given_up) >= _GIVEN_UP:
                    self._given_up.clear()
                self._given_up[name] = began
            raise
        self._given_up.pop(name, None)
        return answer

    def _rows_of(self, reading: Reading, answers: Sequence[Answer]) -> Callable[[str], NameRows]:
        """The rows of each name, by the answers to a reading: see `NameRows.of_answers`."""
        tokens = "hybrid" if self.hybrid else "counter"
        return NameRows.of_answers(
            reading, answers, lambda now: token_source(tokens, lambda: int(now * SECOND) // TICK), BACKEND
        )

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked | BackendError]:
        """See `RowStore.renew`."""
        if not claims:
            return []
        with translating("renew"):
            return await self._connection.run(lambda session: self._renew(session, claims), urgent=True)

    async def _renew(self, session: MysqlSession, claims: Sequence[Claim]) -> list[_Renewed]:
        """
        Renew those whose rows no other transaction has locked, and then the others.

        These wait on a connection of their own, and not for long: the answer about all leases waits, too.
        """
        outcomes: dict[Claim, _Renewed] = {}

        async def transact(reading: Reading) -> dict[Claim, _Renewed]:
            async def work(answers: Sequence[Answer]) -> tuple[list[str], dict[Claim, _Renewed]]:
                rows_of, free = self._rows_of(reading, answers), _known_names(answers[0])
                found: dict[Claim, _Renewed] = {}
                found.update((each, _renewed(rows_of(each.name), each)) for each in late if each.name in free)
                return [change for name in free for change in rows_of(name).changes()], found

            return await session.transact(reading.texts(_in_order(claim.name for claim in late), lock_free=True), work)

        late, shortest = list(claims), min(claim.ttl for claim in claims)
        for pause in (0.0, min(_ROW_PAUSE, shortest / 50)):
            await asyncio.sleep(pause)
            outcomes.update(await _read_as_needed(transact, "renew"))
            if late := [claim for claim in late if claim not in outcomes]:  # a name without a row is not worth a pause
                outcomes.update(await self._renew_unknown(session, late))
                late = [claim for claim in late if claim not in outcomes]
            if not late:
                break
        else:
            outcomes.update(await self._renew_late(late, min(_ROW_PATIENCE, shortest / 15)))
        return [outcomes[claim] for claim in claims]

    async def _renew_unknown(self, session: MysqlSession, claims: Sequence[Claim]) -> Mapping[Claim, _Renewed]:
        """Answer about the names that have no row, and so no grants."""

        async def look(reading: Reading) -> Mapping[Claim, _Renewed]:
            answers = await session.ask(*reading.texts(_in_order(claim.name for claim in claims)))
            rows_of, there = self._rows_of(reading, answers), set(_known_names(answers[0]))
            return {each: _renewed(rows_of(each.name), each) for each in claims if each.name not in there}

        return await _read_as_needed(look, "renew")

    async def _renew_late(self, claims: Sequence[Claim], patience: float) -> Mapping[Claim, _Renewed]:
        """Wait for the rows, one after the other, and last for those that the last renewal did not get."""
        outcomes: dict[Claim, _Renewed] = dict.fromkeys(claims, locked("renew"))
        self._held_up.intersection_update(claim.name for claim in claims)
        name = ""
        try:
            async with asyncio.timeout(patience):
                for claim in sorted(claims, key=lambda claim: claim.name in self._held_up):
                    name = claim.name
                    try:
                        step = name, partial(rules.renew, claim=claim)
                        outcomes[claim] = await self._late_connection.run(
                            partial(self._step, "renew", step, waits=True)
                        )
                    except Exception as error:  # noqa: BLE001  (the others are renewed, whatever it is)
                        outcomes[claim] = translated("renew", error)
                    self._held_up.discard(name)
        except TimeoutError:
            self._held_up.add(name)
            self._late_connection.drop()  # its statement waits on, and the next renewal would stand behind it
        return outcomes

    async def names(self, prefix: str, after: str | None, limit: int) -> Sequence[str]:
        """See `RowStore.names`. It looks at `PAGE` names at a time, most of which may be free."""
        found: list[str] = []
        with translating("list"):
            while True:
                start = f"name >= {hexadecimal(prefix)}" if after is None else f"name > {hexadecimal(after)}"
                # UTF-8 has no byte 0xFF, so no name with this prefix is above it.
                among = f"{start} AND name < CONCAT({hexadecimal(prefix)}, x'ff')"
                names = f"SELECT name FROM fencing_lock WHERE {among}"  # noqa: S608
                (end,) = await self.ask(f"{names} ORDER BY name LIMIT 1 OFFSET {PAGE - 1}")
                last = _text(end[0][0]) if end else None
                to = "" if last is None else f" AND name <= {hexadecimal(last)}"
                (held,) = await self.ask(
                    f"{names}{to} AND held_until > {NOW} ORDER BY name LIMIT {limit - len(found):d}"
                )
                found += [_text(name) for (name,) in held]
                if last is None or len(found) == limit:
                    return found
                after = last

    async def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> Sequence[Claim]:
        """See `RowStore.attend`. All waiters of a group give one sign of life, in one row."""

        async def body(session: MysqlSession) -> Sequence[Claim]:
            names = _in_order(claim.name for claim, _ in waiters)
            standing = f"SELECT name, owner FROM fencing_waiter WHERE waiter_group = {hexadecimal(group)}"  # noqa: S608
            texts = [sign_of_life(group), standing]
            if not names:  # all of them have their grants, and none has left the line yet
                await session.ask(*texts)
                return []
            reading = Reading(line=True, reasons=False)
            _, found, *answers = await session.ask(*texts, *reading.texts(names))
            rows_of = self._rows_of(reading, answers)
            heads = [(name, rules.next_in_line(rows_of(name).rows)) for name in names]
            due = {(name, head.owner) for name, head in heads if head is not None}
            absent, steps = rules.line_repairs(waiters, {(_text(name), _text(owner)) for name, owner in found})
            for step in steps:
                with suppress(RowTakenError):  # the next signs of life find them again
                    await self._step("queue", step, session)
            due.update((claim.name, claim.owner) for claim in absent)
            return [claim for claim, _ in waiters if (claim.name, claim.owner) in due]

        with translating("queue"):
            return await self._connection.run(body, urgent=True)

    def open_box(self, on_message: Callable[[str], object]) -> BellBox | None:
        """See `RowStore.open_box`."""
        return self._own_bell().hear(on_message) if self._with_bell else None

    async def hear_revocations(self, on_message: Callable[[str], object]) -> StopListening | None:
        """See `RowStore.hear_revocations`."""
        if not self._with_bell:
            return None
        bell = self._own_bell()
        box = bell.hear(on_message)

        async def stop() -> None:
            box.close()

        heard = False
        try:
            heard = await bell.opened()
        finally:
            if not heard:
                box.close()
        return stop if heard else None

    def _own_bell(self) -> Bell:
        if self._bell is None or not self._bell.usable:
            self._bell = Bell(self.dialer.dial)
        return self._bell

    async def announce(self, message: str) -> None:
        """See `RowStore.announce`."""
        with translating("revoke"):
            await self._connection.run(lambda session: ring_all(session, message), must_run=True)

    async def aclose(self) -> None:
        """See `RowStore.aclose`."""
        await self._sweeper.task.aclose()
        bell, self._bell = self._bell, None
        if bell is not None and bell.usable:
            asleep = await bell.aclose()
            if asleep is not None:
                with suppress(Exception):  # it wakes within seconds, and finds its socket closed
                    async with asyncio.timeout(_END_PATIENCE):
                        await self._connection.run(lambda session: end(session, asleep, bell.client))
        # The first one may still send requests to the others.
        for each in (self._connection, self._patient_connection, self._late_connection, self._fenced_connection):
            await each.aclose()


def _adapt(session: MysqlSession, error: Exception) -> bool:
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


async def _created(session: MysqlSession, name: str, free: Sequence[str]) -> Sequence[Answer]:
    """Create the row of *name*, and lock it, unless another transaction has locked or created it."""
    key = hexadecimal(name)
    row = f"SELECT 1 FROM fencing_lock WHERE name = {key}"  # noqa: S608
    insert = f"INSERT INTO fencing_lock {_COLUMNS} SELECT {key}, 0, {NOW}, '[]' FROM DUAL WHERE NOT EXISTS ({row})"  # noqa: S608
    try:
        _, _, *answers = await session.ask(f"{row} FOR UPDATE NOWAIT", insert, *free)
    except ServerError as error:
        if code_of(error) not in LOCKED:
            raise
        raise RowTakenError from error
    return answers


def _renewed(of: NameRows, claim: Claim) -> Renewal | Revoked:
    return rules.renew(of.rows, claim)


def _known_names(answer: Answer) -> list[str]:
    """The names that have a row, of an answer to the first of `Reading.texts`."""
    return [_text(name) for _, name, *_ in answer if name is not None]


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of their bytes, in which every client locks them."""
    return sorted(set(names), key=str.encode)


async def _read_as_needed(work: Callable[[Reading], Awaitable[T]], operation: str) -> T:
    """Do *work* without the reasons why grants were ended, and again with them if a rule asks for one."""
    line = operation not in {"renew", "transfer"}
    try:
        return await work(Reading(line=line, reasons=False))
    except NotReadError:
        return await work(Reading(line=line, reasons=True))
