"""
The file as a store of rows. `OpenFile` is what the thread does with it, and `SqliteStore` what the event loop asks for.

Each step is one transaction that begins with the write lock, so that reading, deciding and writing are one step for
every process. A waiter that has to wait on costs no transaction: it reads what is committed. Messages are sent when the
transaction is committed, because the one who reads them looks at the file.

A client hears of revocations on a socket whose name stands in the file meanwhile. Where there are no such sockets (see
`waiter_signs`), or the client is in another network namespace, the next renewal notices the loss.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk._values.clock import BootClock, boot_identity
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.losses import StopListening
from fencing_sdk.backends._shared.row_backend import Step, WaiterAddress
from fencing_sdk.backends._shared.rules import Rows, TokenSource, WaiterRow
from fencing_sdk.backends.sqlite.file import LockFile, busy, translated
from fencing_sdk.backends.sqlite.rows import TOLERANCE, Place, SqliteRows, forget_reasons
from fencing_sdk.backends.sqlite.thread import SqlThread
from fencing_sdk.backends.sqlite.waiter_signs import (
    SignsOfLife,
    WakeupSocket,
    network_identity,
    open_wakeup_socket,
    send_datagram,
    send_wakeup,
)

T = TypeVar("T")

_FIRST_NAMES = "SELECT DISTINCT name FROM fencing_lock WHERE name >= :start ORDER BY name LIMIT :limit"
_NEXT_NAMES = "SELECT DISTINCT name FROM fencing_lock WHERE name > :start ORDER BY name LIMIT :limit"


class OpenFile:
    """The open file. Used by the thread that made it, and by no other."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = place.file

    def look(self, name: str, rule: Callable[[Rows], T]) -> T:
        """Run a *rule* that changes nothing on what is committed."""
        with self._file.snapshot() as now:
            return rule(SqliteRows(self._place, name, now))

    def run(self, steps: Sequence[Step[T]], *, reads: bool = False, durable: bool = False) -> list[T]:
        """Run the rules of all *steps* in one transaction; then wake the waiters that they name."""
        woken: list[tuple[str, WaiterRow]] = []
        answers: list[T] = []
        with self._file.snapshot() if reads else self._file.transaction(durable=durable) as now:
            for name, rule in steps:
                rows = SqliteRows(self._place, name, now)
                answers.append(rule(rows))
                woken += [(name, waiter) for waiter in rows.woken]
        for name, waiter in woken:
            self._send(name, waiter)
        return answers

    def _send(self, name: str, waiter: WaiterRow | None) -> None:
        """Wake *waiter*, or the next in the line if it is gone."""
        while waiter is not None and isinstance(waiter.address, WaiterAddress) and not send_wakeup(waiter.address):
            with self._file.transaction() as now:
                rows = SqliteRows(self._place, name, now)
                rows.leave(waiter.owner)  # if another process has deleted it, the next one is woken all the same
                rules.wake_next(rows)
            waiter = next(iter(rows.woken), None)

    def names(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `RowStore.names`."""
        statement = _FIRST_NAMES if after is None else _NEXT_NAMES
        with self._file.snapshot():
            found = self._file.execute(statement, start=prefix if after is None else after, limit=limit).fetchall()
        return [name for (name,) in found if name.startswith(prefix)]

    def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> list[Claim]:
        """See `RowStore.attend`. All waiters of a group give one sign of life, in one slot, beside the database."""
        with self._file.snapshot() as now:
            standing = self._file.execute(
                "SELECT name, owner, slot FROM fencing_waiter WHERE waiter_group = :group", group=group
            ).fetchall()
            for slot in {slot for _, _, slot in standing}:
                self._place.signs.give(slot, now)
            names = {name for name, _, _ in standing}
            heads = [(name, rules.next_in_line(SqliteRows(self._place, name, now))) for name in names]
        due = {(name, head.owner) for name, head in heads if head is not None}
        absent, steps = rules.line_repairs(waiters, {(name, owner) for name, owner, _ in standing})
        if steps:
            self.run(steps)
        due.update((claim.name, claim.owner) for claim in absent)
        return [claim for claim, _ in waiters if (claim.name, claim.owner) in due]

    def listen(self, socket: str) -> None:
        """Enter the *socket* that hears of revocations."""
        with self._file.transaction():
            self._file.execute(
                "INSERT OR REPLACE INTO fencing_listener (socket, boot, network) VALUES (:socket, :boot, :network)",
                socket=socket,
                boot=self._place.boot,
                network=self._place.network,
            )

    def stop_listening(self, *sockets: str) -> None:
        """Delete *sockets* that hear no more."""
        with self._file.transaction():
            for socket in sockets:
                self._file.execute("DELETE FROM fencing_listener WHERE socket = :socket", socket=socket)

    def announce(self, message: str) -> None:
        """Send *message* to every socket that can be reached from here. Delete those that are gone."""
        with self._file.snapshot():
            found = self._file.execute(
                "SELECT socket FROM fencing_listener WHERE boot = :boot AND network = :network",
                boot=self._place.boot,
                network=self._place.network,
            ).fetchall()
        if gone := [socket for (socket,) in found if not send_datagram(socket, message)]:
            self.stop_listening(*gone)

    def sweep(self) -> None:
        """Delete what has ended: no call may ask about it again. The last token is a row apart and stays."""
        with self._file.transaction() as now:
            boot = self._place.boot
            self._file.execute(
                "DELETE FROM fencing_lock WHERE boot <> :boot OR expires <= :now OR renewed > :now + :tolerance",
                boot=boot,
                now=now,
                tolerance=TOLERANCE,
            )
            for number, of, slot in self._file.execute("SELECT number, boot, slot FROM fencing_waiter").fetchall():
                if self._place.silent_at(of, slot, now) <= now:
                    self._file.execute("DELETE FROM fencing_waiter WHERE number = :number", number=number)
            forget_reasons(self._place, now)
            self._file.execute("DELETE FROM fencing_listener WHERE boot <> :boot", boot=boot)

    def outdated(self) -> bool:
        """Return whether the other processes use another file by now."""
        return self._file.moved()

    def close(self) -> None:
        """Close the file, and delete the file of the signs if the last waiter has gone."""
        with suppress(sqlite3.Error, OSError):
            self._tidy()
        self._place.signs.close()
        self._file.close()

    def _tidy(self) -> None:
        if self._place.signs.exist() and not self._file.moved():
            with self._file.transaction(patience=0.0):  # so that no waiter joins meanwhile
                if self._file.execute("SELECT 1 FROM fencing_waiter LIMIT 1").fetchone() is None:
                    self._place.signs.remove()


class _Opener:
    """How the thread opens the file. It refers to no backend, so that a backend that is dropped ends its thread."""

    def __init__(self, path: str, synchronous: str, next_token: TokenSource, busy: threading.Event) -> None:
        self._path = Path(path)
        self._synchronous = synchronous
        self._next_token = next_token
        self._busy = busy

    def __call__(self) -> OpenFile:
        self._path = self._path.absolute()  # once: a later change of the working directory moves nothing
        file = LockFile(self._path, synchronous=self._synchronous, clock=BootClock(), busy=self._busy)
        opened = OpenFile(Place(file, SignsOfLife(self._path), self._next_token, boot_identity(), network_identity()))
        try:
            opened.sweep()
        except BaseException:
            opened.close()
            raise
        return opened


class SqliteStore:
    """The file, as `RowBackend` asks for it: see `RowStore`."""

    def __init__(self, path: str, *, synchronous: str, next_token: TokenSource) -> None:
        self._path = path
        self._busy = threading.Event()
        self.sql = SqlThread(_Opener(path, synchronous, next_token, self._busy))
        self._hearing: WakeupSocket | None = None
        self._errors_of = partial(ErrorTranslation, partial(translated, path))

    async def open(self) -> None:
        """See `RowStore.open`."""
        await self._ask("open", lambda _: None)

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
        """See `RowStore.run`."""

        def work(file: OpenFile) -> T:
            if look is not None and (answer := file.look(name, look)) is not None:
                return answer
            (answer,) = file.run([(name, rule)], reads=reads, durable=durable)
            return answer

        return await self._ask(operation, work, surely=surely)

    async def look(self, operation: str, steps: Sequence[Step[T]]) -> Sequence[T]:
        """See `RowStore.look`."""
        if not steps:
            return []
        return await self._ask(operation, partial(OpenFile.run, steps=steps, reads=True), urgent=operation == "renew")

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `RowStore.renew`."""
        if not claims:
            return []
        steps = [(claim.name, partial(rules.renew, claim=claim)) for claim in claims]
        return await self._ask("renew", partial(OpenFile.run, steps=steps, reads=False), urgent=True)

    async def names(self, prefix: str, after: str | None, limit: int) -> Sequence[str]:
        """See `RowStore.names`."""
        return await self._ask("list", partial(OpenFile.names, prefix=prefix, after=after, limit=limit))

    async def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> Sequence[Claim]:
        """See `RowStore.attend`."""
        return await self._ask("queue", partial(OpenFile.attend, group=group, waiters=waiters), urgent=True)

    def open_box(self, on_message: Callable[[str], object]) -> WakeupSocket | None:
        """See `RowStore.open_box`."""
        return open_wakeup_socket(on_message)

    async def hear_revocations(self, on_message: Callable[[str], object]) -> StopListening | None:
        """See `RowStore.hear_revocations`."""
        if self._hearing is not None:  # of an earlier loop, or of a call that has failed
            self._hearing.close()
        self._hearing = open_wakeup_socket(on_message)
        if self._hearing is None:
            return None
        await self._ask("listen", partial(OpenFile.listen, socket=self._hearing.name), urgent=True)
        return self._stop_hearing

    async def _stop_hearing(self) -> None:
        """Close the socket and delete its row. A forked child closes only its copy: the row is the parent's."""
        hearing, self._hearing = self._hearing, None
        if hearing is None:
            return
        hearing.close()
        if hearing.of_this_process and self.sql.started:
            await self._ask("listen", lambda file: file.stop_listening(hearing.name), urgent=True, surely=True)

    async def announce(self, message: str) -> None:
        """See `RowStore.announce`."""
        await self._ask("revoke", partial(OpenFile.announce, message=message), surely=True)

    async def aclose(self) -> None:
        """See `RowStore.aclose`."""
        with suppress(Exception):  # the next revocation deletes a row without a socket
            await self._stop_hearing()
        closed = self.sql.close()
        if closed is not None:
            await asyncio.wrap_future(closed)

    async def _ask(
        self, operation: str, do: Callable[[OpenFile], T], *, urgent: bool = False, surely: bool = False
    ) -> T:
        with self._errors_of(operation):
            try:
                return await asyncio.wrap_future(self.sql.submit(do, urgent=urgent, surely=surely))
            except asyncio.CancelledError as error:
                if self._busy.is_set():
                    error.__cause__ = busy(self._path, operation)
                raise
