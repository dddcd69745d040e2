"""
Rows of the application's tables as a store without a line: a claim is a draw, a renewal a keep.

The tasks of a client that wait for rows of one table share a statement. One is under way at a time: with a second one
beside it, each statement claimed fewer rows, and each row cost more. A claim whose answer is lost costs nothing but
time: its rows are free again after one ttl.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fencing_sdk._values.answer import Answer, Settled
from fencing_sdk._values.claim import HELD, Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.reports import Finding
from fencing_sdk._values.tasks import start_task
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk.abc import Bell, Kept
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, UsageError
from fencing_sdk.guards.sql._transaction import Transaction
from fencing_sdk.rows._table import STORE, ClaimedRow, RowFacts, Settling, Table, finishing

_MOST = 100
"""Rows that one statement claims."""
LONGEST_REST = 86400.0
"""Seconds for which a row that is given back stays leased, at most."""

Renewal = tuple[Any, int, float]
"""Key, token and seconds of a row that is to be renewed, or that is to be given back after so many seconds."""


class RowDatabase(Protocol):
    """
    Statements of one kind of database, on connections of their own. Each method is one atomic step.

    Raises, from every method: BackendUnavailableError, BackendRefusedError, as a store.
    """

    dialect: str
    """SQLAlchemy's name of the dialect."""

    async def open(self) -> None:
        """Connect."""
        ...

    async def check(self, table: Table) -> None:
        """Refuse a table that cannot have leases, and fill in what is known of it."""
        ...

    async def claim(self, table: Table, count: int, label: str | None) -> Sequence[Mapping[str, Any]]:
        """Lease at most *count* rows that are free, each under its next token, and return them."""
        ...

    async def lease_for(self, table: Table, rows: Sequence[Renewal], *, running: bool) -> set[tuple[Any, int]]:
        """
        Let leases end in so many seconds from now, and return keys and tokens of those that were found; 0 frees a row.

        With *running*, which is a renewal, no lease is revived that has run out. Rows that a transaction has locked are
        left alone.
        """
        ...

    async def last_claims(self, table: Table, keys: Sequence[Any]) -> Mapping[Any, tuple[int, bool]]:
        """Return the last token of each row that is there, and True if its lease runs."""
        ...

    async def leased(
        self, table: Table, keys: Sequence[str] | None, after: str | None, limit: int
    ) -> Mapping[str, Seen]:
        """
        Return at most *limit* leases that run, by keys as texts and in their order (see `seen_lease`).

        They are those of *keys*, or, without any, of the next rows *after* this key; None begins with the first row.
        """
        ...

    async def end(self, table: Table, key: str, token: int) -> bool:
        """Free a row that is leased under this *token*, and give it the next token. False: it is not."""
        ...

    async def facts(self) -> RowFacts:
        """Return what a diagnosis judges."""
        ...

    def listen(self, channel: str, ring: Callable[[], None]) -> None:
        """Call *ring* for each notification on *channel*, as far as the database has them."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(eq=False, slots=True)
class Held:
    """Rows of one lease, of a task or a thread, and what is to become of them when it ends."""

    table: Table
    rows: Sequence[ClaimedRow]
    after: float = 0.0
    """Seconds for which they stay leased once they are given back."""
    finished: bool = False
    """Finished in a transaction of the user, which may not be over: its lock on the rows is the lease."""
    in_doubt: bool = True
    """False if its block ended as it should, so that the transaction was not rolled back."""

    def finishing(self, columns: Mapping[str, object]) -> Settling:
        """Finish the rows in a transaction of the user: see `fencing_sdk.rows._table.finishing`."""
        settle = finishing(self.table, self.rows, columns)

        async def finish(opened: Transaction) -> None:
            await settle(opened)
            self.finished = True

        return finish

    def claims(self) -> set[tuple[str, int]]:
        """Return each row by its name, with its token."""
        return {(self.table.lease_name([row]), row.token) for row in self.rows}

    def put_off(self, delay: Seconds) -> None:
        """
        Have the rows stay leased for *delay* seconds once they are given back.

        Raises:
            ConfigurationError: *delay* is not a time up to a day.
            UsageError: the rows were finished.
        """
        if self.finished:
            msg = "the row was finished, so it cannot be put off"
            raise UsageError(msg)
        self.after = seconds(delay, "delay", high=LONGEST_REST)

    def end_block(self, raised: BaseException | None) -> None:
        """Note how the block of the lease ends: an error keeps the rows for the ``rest`` of their table."""
        self.in_doubt = raised is not None
        if isinstance(raised, Exception):
            self.after = self.table.rest


@dataclass(eq=False, slots=True)
class _Wanted:
    claim: Claim
    count: int
    answer: Answer[Place | Busy]
    left: bool = False


class RowStore(Uncopied):
    """A store whose tickets are rows. A claim has the name of a table, and its place the name of a row."""

    rings = False

    def __init__(self, database: RowDatabase, listed: Sequence[Table] = ()) -> None:
        self.database = database
        self.modes = frozenset[str]() if listed else frozenset({"lock"})
        """Empty for those who only look: no row is claimed by its name."""
        self._listed = {table.name: table for table in listed}
        self.tables: dict[str, Table] = {}
        """Tables by the names of their claims."""
        self.counts: dict[str, int] = {}
        """Rows that one claim takes, by the names of claims; 1 where there is none."""
        self.held: dict[str, Held] = {}
        """Rows by the owners of their leases."""
        self.ring: Callable[[str], object] = lambda _: None
        """Called with the name of a claim when there may be a row for it."""
        self._forget()

    def _forget(self) -> None:
        self._wanted: dict[str, deque[_Wanted]] = {}
        self._claiming: set[str] = set()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`. Tables that are known by then are checked."""
        self._forget()  # what an event loop that is gone, or the parent of a forked child, has left under way
        await self.database.open()
        for table in (*self.tables.values(), *self._listed.values()):
            await self._check(table)

    async def _check(self, table: Table) -> None:
        if not table.checked:
            await self.database.check(table)
            table.checked = True

    def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Answer[Place | Busy]:
        """See `fencing_sdk.abc.Backend.draw`. Rows are claimed by the tables of a client alone."""
        del only_if_it_holds  # there is no line
        name = claim.name
        if name not in self.tables:
            detail = "rows are claimed by fencing_sdk.rows.row_client(), and not by a lock; this URL is to look at them"
            raise BackendRefusedError(STORE, "acquire", detail)
        if (held := self.held.get(claim.owner)) is not None:
            return Settled(_place(held))
        answer: Answer[Place | Busy] = Answer(asyncio.get_running_loop())
        self._wanted.setdefault(name, deque()).append(_Wanted(claim, self.counts.get(name, 1), answer))
        if name not in self._claiming:
            self._claiming.add(name)
            start_task(self._claim(name), "fencing-claim")
        return answer

    async def _claim(self, name: str) -> None:
        """Claim rows until no task waits for one."""
        wanted, table = self._wanted[name], self.tables[name]
        try:
            await asyncio.sleep(0)  # tasks that ask in this turn of the loop share the statement
            while wanted:
                batch: list[_Wanted] = []
                while wanted and sum(each.count for each in batch) < _MOST:
                    if not wanted[0].answer.done():
                        batch.append(wanted[0])
                    wanted.popleft()
                if batch:
                    await self._claim_for(table, batch)
        finally:
            self._claiming.discard(name)

    def _heard(self, channel: str) -> None:
        for name, table in self.tables.items():
            if table.notify == channel:
                self.ring(name)

    async def _claim_for(self, table: Table, batch: Sequence[_Wanted]) -> None:
        try:
            await self._check(table)
            if table.notify is not None:
                self.database.listen(table.notify, partial(self._heard, table.notify))
            count = sum(each.count for each in batch)
            found = await self.database.claim(table, count, batch[0].claim.label)
        except BaseException as error:
            for each in batch:
                each.answer.fail(error if isinstance(error, Exception) else BackendUnavailableError(STORE, "acquire"))
            if isinstance(error, Exception):
                return
            raise
        rows = [ClaimedRow(row[table.key], row["lease_token"], row) for row in found]
        for each in batch:
            if each.left or each.answer.done():
                continue
            if not rows:
                each.answer.settle(Busy())
                continue
            mine, rows = rows[: each.count], rows[each.count :]
            held = self.held[each.claim.owner] = Held(table, mine)
            each.answer.settle(_place(held))
        if rows:  # tasks that wanted them have left
            with suppress(BackendError):  # they are free after the ttl, and others wait for the next claim
                await self.database.lease_for(table, [(row.key, row.token, 0.0) for row in rows], running=False)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`. One statement for each table."""
        answers: list[Place | Gone | None] = [HELD] * len(tickets)
        asked: dict[Table, list[tuple[int, Renewal]]] = {}
        for at, (claim, _) in enumerate(tickets):
            held = self.held.get(claim.owner)
            if held is None:
                answers[at] = Gone()
            elif not held.finished:  # else the transaction that finishes it keeps the row, however long it takes
                asked.setdefault(held.table, []).extend((at, (row.key, row.token, claim.ttl)) for row in held.rows)
        failure: BackendError | None = None
        for table, rows in asked.items():
            try:
                outcomes = await self._renew(table, [renewal for _, renewal in rows])
            except BackendError as error:
                failure, outcomes = error, [None] * len(rows)
            for (at, _), outcome in zip(rows, outcomes, strict=True):
                held = self.held.get(tickets[at][0].owner)
                finished = held is not None and held.finished  # meanwhile
                if outcome is not HELD and not finished and not isinstance(answers[at], Gone):
                    answers[at] = outcome
        if failure is not None and not any(answers):
            raise failure
        return answers

    async def _renew(self, table: Table, rows: Sequence[Renewal]) -> Sequence[Place | Gone | None]:
        """Renew the leases of rows. None stands for a row that a transaction has locked."""
        done = await self.database.lease_for(table, rows, running=True)
        missing = [key for key, token, _ in rows if (key, token) not in done]
        found = await self.database.last_claims(table, missing) if missing else {}
        outcomes: list[Place | Gone | None] = []
        for key, token, _ in rows:
            last, runs = found.get(key, (token, False))
            if (key, token) in done:
                outcomes.append(HELD)
            elif last == token and runs:
                outcomes.append(None)
            else:
                outcomes.append(Gone(taken=last != token))
        return outcomes

    def give_back(self, claim: Claim, *, after: float = 0.0) -> Awaitable[Gone | None]:
        """See `fencing_sdk.abc.Backend.give_back`. What was finished stays as it is, and asks the database nothing."""
        held = self.held.get(claim.owner)
        if held is None:
            for each in self._wanted.get(claim.name, ()):
                each.left = each.left or each.claim.owner == claim.owner
        elif not held.finished or held.in_doubt:
            return self._free(claim.owner, held, max(after, held.after))
        else:
            del self.held[claim.owner]
        return Settled(None)

    async def _free(self, owner: str, held: Held, after: float) -> None:
        """Free the rows of a lease. A transaction that has one locked may be about to end by itself: ask again."""
        ends = [(row.key, row.token, after) for row in held.rows]
        freed = await self.database.lease_for(held.table, ends, running=False)
        if len(freed) < len(held.rows):
            keys = [str(row.key) for row in held.rows]
            leased = await self.database.leased(held.table, keys, None, len(keys))
            if any(key in leased and leased[key].token == row.token for key, row in zip(keys, held.rows, strict=True)):
                raise BackendUnavailableError(STORE, "release", "a transaction has the row locked")
        self.held.pop(owner, None)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`. A row has no room for the *reason*: the holder finds it taken over."""
        del reason
        table, key = self._row("revoke", name)
        return await self.database.end(table, key, token)

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`. There is no line."""
        asked: dict[Table, list[str]] = {}
        rows = [self._row("inspect", name) for name in names]
        for table, key in rows:
            asked.setdefault(table, []).append(key)
        found = {table: await self.database.leased(table, keys, None, len(keys)) for table, keys in asked.items()}
        return [[found[table][key]] if key in found[table] else [] for table, key in rows]

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`. The cursor is the name of a row, or of a table that comes next."""
        tables = [name for name in self._listed if f"{name}/".startswith(prefix[: len(name) + 1])]
        name, is_row, key = (cursor or "").partition("/")
        at = tables.index(name) if cursor else 0
        if at == len(tables):
            return [], None
        name = tables[at]
        found = await self.database.leased(self._listed[name], None, key if is_row else None, limit)
        rows = [f"{name}/{each}" for each in found]
        following = rows[-1] if len(rows) == limit else next(iter(tables[at + 1 :]), None)
        return [row for row in rows if row.startswith(prefix)], following

    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        from fencing_sdk.rows._diagnosis import findings_of  # noqa: PLC0415  (who works on rows does not load it)

        del ttl  # no setting depends on it
        return await findings_of(await self.database.facts())

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        return (await self.database.facts()).now

    def _row(self, operation: str, name: str) -> tuple[Table, str]:
        table, _, key = name.partition("/")
        if table not in self._listed:
            known = ", ".join(self._listed) or "none"
            detail = f"a row has a name like 'jobs/42', which begins with a table of the URL ({known})"
            raise BackendRefusedError(STORE, operation, detail)
        return self._listed[table], key

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`. No bell rings here."""
        del claim, bell
        return lambda: None

    async def aclose(self) -> None:
        """See `fencing_sdk.abc.Backend.aclose`."""
        await self.database.aclose()


def _place(held: Held) -> Place:
    return Place(max(row.token for row in held.rows), name=held.table.lease_name(held.rows))
