"""
The server as a store of rows: each step is one transaction of two texts, as `rows` explains.

The connection for all calls takes the rows that no other transaction has locked, so one lock whose row is held up does
not hold up the others. A call for a row that is locked waits for it on another connection, behind its kind. A renewal
waits for a moment, on a third one, and the next heartbeat tries then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fencing_sdk._mysql.driver import LOCK_PATIENCE, code_of
from fencing_sdk._mysql.driver import Rows as Answer
from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal, Revoked
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.fences import FenceRaising, Fences
from fencing_sdk.backends._shared.losses import StopListening
from fencing_sdk.backends._shared.request_queue import SILENCE, QueuedRequest, RequestConnection
from fencing_sdk.backends._shared.row_backend import Step, WaiterAddress
from fencing_sdk.backends._shared.rules import Rows
from fencing_sdk.backends.mysql import rows
from fencing_sdk.backends.mysql.bell import Bell, BellBox, end, ring_all
from fencing_sdk.backends.mysql.dial import MysqlDialer
from fencing_sdk.backends.mysql.errors import (
    BACKEND,
    GONE,
    NO_TABLE,
    READ_ONLY,
    ROLLED_BACK,
    translated,
    translating,
)
from fencing_sdk.backends.mysql.rows import Reading
from fencing_sdk.backends.mysql.session import MysqlSession
from fencing_sdk.backends.mysql.steps import MysqlSteps, RowTakenError, in_order, lazily, locked
from fencing_sdk.backends.mysql.sweep import Sweeper
from fencing_sdk.errors import BackendError

T = TypeVar("T")
_Renewed = Renewal | Revoked | BackendError

_RAISING = FenceRaising(BACKEND, code_of, {NO_TABLE, 1054, 1142, 1143})
_ROW_PAUSE = 0.02
"""Seconds after which a renewal looks once more for a row that another transaction keeps locked."""
_ROW_PATIENCE = 0.2
"""Seconds for which it then waits among the others that want the row, if the ttl is not short."""
_END_PATIENCE = 0.5
_CLOCK = BootClock()


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    """A call that waits for its row, on another connection."""

    request: QueuedRequest[MysqlSession]


class MysqlStore:
    """
    A server, as `RowBackend` asks for it: see `RowStore`.

    Args:
        dialer: Opens connections.

        hybrid: Whether tokens follow the clock: see `token_source`.

        bell: Whether clients sleep on a second connection until others wake them.

        retention: Seconds for which a lock must have been free before its row is deleted.
    """

    def __init__(self, dialer: MysqlDialer, *, hybrid: bool, bell: bool, retention: float) -> None:
        self.dialer = dialer
        self.hybrid = hybrid
        self._steps = MysqlSteps(hybrid=hybrid)
        self._with_bell = bell
        self._connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + _ROW_PATIENCE)
        self._patient_connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + LOCK_PATIENCE)
        """For calls that wait for rows."""
        self._late_connection = RequestConnection(dialer.dial, _adapt)
        """For renewals that wait for rows."""
        self._held_up: set[str] = set()
        """The names for whose rows the last renewal waited in vain."""
        self._fenced_connection = RequestConnection(dialer.dial, _adapt, silence=SILENCE + 2 * LOCK_PATIENCE)
        """For those that wait for the row of a lock and for that of a fence."""
        self._bell: Bell | None = None
        self._sweeper = Sweeper(self._connection, retention if hybrid else None)

    async def open(self) -> None:
        """See `RowStore.open`."""
        with translating("open"):
            await self.ask("DO 0")

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

        async def body(session: MysqlSession) -> T | _Waiting[T]:
            if look is not None:
                (known,) = await self._steps.look(session, operation, [(name, look)])
                if known is not None:
                    return known
            try:
                return await self._steps.run(session, operation, (name, rule))
            except RowTakenError:
                wait = partial(self._steps.wait, operation, (name, rule), _CLOCK.now(), lambda: surely or not gone)
                return _Waiting(self._patient_connection.put(wait, urgent=urgent, must_run=surely))

        urgent, gone = operation == "release", False
        try:
            with translating(operation):
                answer = await self._connection.run(body, urgent=urgent, must_run=surely)
                if isinstance(answer, _Waiting):
                    answer = await self._patient_connection.answer_to(answer.request)
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
                await _RAISING.raise_all(session.for_guards(), claim, fences, outcome.token)

        gone, step = False, (claim.name, rule)
        body = partial(self._steps.wait, "acquire", step, _CLOCK.now(), lambda: not gone, before_commit=raise_all)
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
                lambda session: self._steps.look(session, operation, steps), urgent=operation == "renew"
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
                rows_of = self._steps.rows_of(reading, answers)
                free = rows.known_names(answers[0])
                found: dict[Claim, _Renewed] = {}
                found.update((each, rows_of(each.name).apply(_renewing(each))) for each in late if each.name in free)
                return [change for name in free for change in rows_of(name).changes()], found

            names = in_order(claim.name for claim in late)
            return await session.transact(reading.texts(names, lock_free=True), work)

        late = list(claims)
        for pause in (0.0, min(_ROW_PAUSE, _shortest(claims) / 50)):
            await asyncio.sleep(pause)
            outcomes.update(await lazily(transact, "renew"))
            if late := [claim for claim in late if claim not in outcomes]:  # a name without a row is not worth a pause
                outcomes.update(await self._renew_unknown(session, late))
                late = [claim for claim in late if claim not in outcomes]
            if not late:
                break
        else:
            outcomes.update(await self._renew_late(late, min(_ROW_PATIENCE, _shortest(claims) / 15)))
        return [outcomes[claim] for claim in claims]

    async def _renew_unknown(self, session: MysqlSession, claims: Sequence[Claim]) -> Mapping[Claim, _Renewed]:
        """Answer about the names that have no row, and so no grants."""

        async def look(reading: Reading) -> Mapping[Claim, _Renewed]:
            answers = await session.ask(*reading.texts(in_order(claim.name for claim in claims)))
            rows_of, there = self._steps.rows_of(reading, answers), set(rows.known_names(answers[0]))
            return {each: rows_of(each.name).apply(_renewing(each)) for each in claims if each.name not in there}

        return await lazily(look, "renew")

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
                        outcomes[claim] = await self._late_connection.run(partial(self._renew_patiently, claim))
                    except Exception as error:  # noqa: BLE001  (the others are renewed, whatever it is)
                        outcomes[claim] = translated("renew", error)
                    self._held_up.discard(name)
        except TimeoutError:
            self._held_up.add(name)
            self._late_connection.drop()  # its statement waits on, and the next renewal would stand behind it
        return outcomes

    async def _renew_patiently(self, claim: Claim, session: MysqlSession) -> Renewal | Revoked:
        return await self._steps.run(session, "renew", (claim.name, _renewing(claim)), waits=True)

    async def names(self, prefix: str, after: str | None, limit: int) -> Sequence[str]:
        """See `RowStore.names`."""
        found: list[str] = []
        with translating("list"):
            while True:
                (end,) = await self.ask(rows.end_of_page(prefix, after))
                last = rows.read_names(end)[0] if end else None
                (held,) = await self.ask(rows.held_names(prefix, after, last, limit - len(found)))
                found += rows.read_names(held)
                if last is None or len(found) == limit:
                    return found
                after = last

    async def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> Sequence[Claim]:
        """See `RowStore.attend`. All waiters of a group give one sign of life, in one row."""

        async def body(session: MysqlSession) -> Sequence[Claim]:
            names = in_order(claim.name for claim, _ in waiters)
            texts = [rows.sign_of_life(group), rows.standing(group)]
            if not names:  # all of them have their grants, and none has left the line yet
                await session.ask(*texts)
                return []
            reading = Reading(line=True, reasons=False)
            _, found, *answers = await session.ask(*texts, *reading.texts(names))
            rows_of = self._steps.rows_of(reading, answers)
            heads = [(name, rows_of(name).apply(rules.next_in_line)) for name in names]
            due = {(name, head.owner) for name, head in heads if head is not None}
            absent, steps = rules.line_repairs(waiters, rows.read_standing(found))
            for step in steps:
                with suppress(RowTakenError):  # the next signs of life find them again
                    await self._steps.run(session, "queue", step)
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

    async def create_schema(self) -> None:
        """Create the tables that are missing."""
        with translating("create_schema"):
            await self.dialer.create_schema()

    async def aclose(self) -> None:
        """See `RowStore.aclose`."""
        await self._sweeper.aclose()
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


def _renewing(claim: Claim) -> Callable[[Rows], Renewal | Revoked]:
    return partial(rules.renew, claim=claim)


def _shortest(claims: Sequence[Claim]) -> float:
    return min(claim.ttl for claim in claims)
