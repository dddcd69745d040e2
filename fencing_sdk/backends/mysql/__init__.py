"""
Locks in MySQL or MariaDB, beside the data that they protect.

    connect("mysql://user:password@localhost:3306/app")
    connect("mariadb://db1,db2/app?tls=true&ca=/etc/ssl/db.pem")   # the first host that takes writes

Tokens: hybrid by default, kept in the line's row. Clock: the server's, read while the row is locked. Waiters: first
come, first served, rung by KILL QUERY. One connection for the requests, and one that sleeps while a ticket waits or
holds.

    __init__.py    the backend, its options and its URL
    store.py       the server, and steps on it: what waits for a row that another transaction has locked
    lines.py       the texts that read and write a line
    sweep.py       deletes what is no longer needed
    bell.py        the connection that sleeps until another client rings
    connection.py  opens a session with the server that takes writes, and what a transaction on it is
    schema.sql     the tables
    errors.py      translates errors of the server to those of the contract
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from fencing_sdk._mysql.driver import Rows, ServerError, code_of, hexadecimal
from fencing_sdk._mysql.url import read_mysql_url
from fencing_sdk._values.claim import Busy, Claim, Gone, Permit, Place, Seen
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import option_names, read_hybrid, read_seconds, read_switch
from fencing_sdk.abc import ALL_MODES, Bell, Kept
from fencing_sdk.abc.line import WAITER_TTL, Line
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.bells import Bells
from fencing_sdk.backends.mysql import lines
from fencing_sdk.backends.mysql.bell import MysqlBell, end
from fencing_sdk.backends.mysql.connection import NOW, SCHEMA, MysqlDialer, MysqlSession
from fencing_sdk.backends.mysql.errors import LOCKED, locked, translating
from fencing_sdk.backends.mysql.lines import NameLine
from fencing_sdk.backends.mysql.store import MysqlStore, RowTakenError
from fencing_sdk.backends.mysql.sweep import Sweeper

__all__ = ["MysqlBackend", "from_url"]

PAGE = 10_000
"""Names that one statement of a listing looks at: renewals wait for it."""
_BATCH = 1000
"""Tickets that one transaction keeps."""
_ROW_PATIENCE = 0.2
"""Seconds for which a keep waits among the others that want a row, if the ttl is not short."""
_END_PATIENCE = 0.5
_Answers: TypeAlias = dict[int, Place | Gone]
"""Answers of a keep, by the places of their tickets in its list."""
_Asked: TypeAlias = Sequence[tuple[int, Claim, int]]
"""Tickets of a keep: the place of each in its list, its claim and its number."""


class MysqlBackend(Uncopied):
    """
    A lock service in MySQL, from version 8.0 on, or MariaDB, from version 10.6 on.

    Args:
        url: ``mysql://user:password@host:port/database``, or ``mariadb://``, which means the same. Of several hosts,
            separated by commas, the backend uses the first one that takes writes.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which repeat when the server loses the last grants.

        create: Whether the first call that misses the tables creates them.

        bell: Whether a client with waiters, or with a lock that it holds for longer than a moment, keeps a second
            connection on which others wake it. Without it waiters look once a second.

        connect_timeout: Seconds that the opening of a connection may take.

        unix_socket: The path of the server's socket, instead of a host.

        tls: Whether connections use TLS. Then the server's certificate is checked.

        ca: PEM file of the authorities to trust. The default is the system's.

        cert: PEM file of the client's certificate, for servers that ask for one.

        key: PEM file of its key, unless it is in *cert*.

        ssl_context: A context for TLS, instead of the files.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    modes: Collection[str] = ALL_MODES
    rings = True

    def __init__(
        self,
        url: str,
        *,
        tokens: str = "hybrid",
        create: bool = True,
        bell: bool = True,
        connect_timeout: float = 4.0,
        unix_socket: str | None = None,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        address = read_mysql_url(
            url, unix_socket=unix_socket, tls=tls, ca=ca, cert=cert, key=key, ssl_context=ssl_context
        )
        patience = read_seconds("connect_timeout", connect_timeout)
        dialer = MysqlDialer(address, create=read_switch("create", create), patience=patience)
        self._mysql = MysqlStore(dialer, hybrid=read_hybrid(tokens))
        self._bells = Bells()
        self._bell = MysqlBell(dialer.dial, self._bells) if read_switch("bell", bell) else None
        self._sweeper = Sweeper(self._mysql)
        self._held_up: set[str] = set()  # names for whose rows the last keep waited in vain

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await self._mysql.ask("DO 0")

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        client, store = self._client, self._mysql

        def rule(line: Line, now: float) -> Place | Busy:
            return line.draw(claim, now, only_if_it_holds=only_if_it_holds, address=client)

        async def at_once(session: MysqlSession) -> tuple[Place | Busy] | None:
            if claim.name not in store.crowded and (token := await _take(session, texts, claim.name)):
                return (Place(token, 0 if isinstance(claim.mode, Permit) else None, 2 * token),)
            if only_if_it_holds:
                found = (await store.look(session, {claim.name: [claim.owner]}))[claim.name]
                answer = found.run(rule)
                if isinstance(answer, Busy) and found.enough and not found.changes():
                    return (answer,)
            return None

        with translating("acquire"):
            texts = lines.take(claim, client, hybrid=store.hybrid)
        place = await store.run("acquire", claim.name, rule, claim.owner, at_once=at_once)
        if isinstance(place, Place) and place.token is None:
            self._listen()
        self._sweeper.start_if_due(claim.name)
        return place

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""

        def rule(line: Line, now: float) -> Gone | None:
            return line.give_back(claim.owner, now, after)

        async def at_once(session: MysqlSession) -> tuple[None] | None:
            if after > 0 or claim.name in self._mysql.crowded:
                return None
            ((done,),) = (await session.change(*lines.leave(claim)))[-1]
            return (None,) if done == 1 else None

        owners = claim.owner, f"-{claim.owner}"
        return await self._mysql.run("release", claim.name, rule, *owners, at_once=at_once, surely=True)

    async def pass_on(self, claim: Claim, heir: Claim) -> Place | Gone:
        """See `fencing_sdk.abc.PassesOn.pass_on`."""
        client = self._client

        def rule(line: Line, now: float) -> Place | Gone:
            return line.pass_on(claim.owner, heir, now, client)

        return await self._mysql.run("transfer", claim.name, rule, claim.owner, heir.owner)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        over = await self._mysql.run("revoke", name, lambda line, now: line.end(token, reason, now), reason=reason)
        return bool(over)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """
        See `fencing_sdk.abc.Backend.keep`.

        One transaction keeps a batch. If it fails, its tickets have no answer, and the other batches keep theirs. If
        all fail, so does the call. Tickets whose rows are locked are waited for at the end, and not for long.
        """
        answers: _Answers = {at: Gone() for at, (claim, _) in enumerate(tickets) if not _storable(claim.name)}
        asked = [(at, claim, number) for at, (claim, number) in enumerate(tickets) if at not in answers]
        failure: Exception | None = None
        with translating("renew"):
            for start in range(0, len(asked), _BATCH):
                batch = asked[start : start + _BATCH]
                try:
                    answers |= await self._mysql.connection.run(partial(self._keep, batch), urgent=True)
                    await self._keep_late([each for each in batch if each[0] not in answers], answers)
                except Exception as error:  # noqa: BLE001  (it is raised below, unless another batch has answers)
                    failure = error
            if asked and not any(at in answers for at, _, _ in asked):
                raise failure or locked("renew")
        self._listen()
        return [answers.get(at) for at in range(len(tickets))]

    async def _keep(self, tickets: _Asked, session: MysqlSession) -> _Answers:
        """Keep the tickets whose rows no other transaction has locked."""
        answers: _Answers = {}
        waiting = set[int]()

        async def work(found: Sequence[Rows]) -> tuple[list[str], None]:
            rows = {(row[1], row[2]): row for each in found for row in each}
            lives: dict[int, list[lines.Numbered]] = {}
            for at, claim, number in tickets:
                row = rows.get((claim.name.encode(), number))
                if row is None or not lines.lives(claim.owner, row):
                    continue
                *_, token, permit, _ = row
                micros = lines.micros_of(claim.ttl if token is not None else min(claim.ttl, WAITER_TTL))
                lives.setdefault(micros, []).append((claim.name, number))
                if token is None:
                    waiting.add(at)
                else:
                    answers[at] = Place(token, permit, number)
            return [text for micros, kept in lives.items() for text in lines.live_on(kept, micros)], None

        if texts := lines.lock_kept([(claim.name, number) for _, claim, number in tickets if number]):
            await session.transact(texts, work)
        names: dict[str, list[tuple[int, Claim, int]]] = {}
        for each in tickets:
            if each[0] not in answers:
                names.setdefault(each[1].name, []).append(each)
        if names:
            missing = {
                name: [claim.owner for at, claim, _ in those if at not in waiting] for name, those in names.items()
            }
            for name, found in (await self._mysql.look(session, missing)).items():
                answers |= await self._keep_in(found, names[name], waiting, session)
        return answers

    async def _keep_in(
        self, found: NameLine, tickets: _Asked, waiting: Collection[int], session: MysqlSession
    ) -> _Answers:
        """
        Answer for tickets of one name that wait, or that were not found.

        A look is enough, unless one ahead has died, or one of these has begun to hold or is there after all.
        """

        def rule(line: Line, now: float) -> _Answers:
            line.settle(now)
            read = {at for at, claim, _ in tickets if at not in waiting or claim.owner in line.rows}
            return {
                at: line.keep(claim, now, number) if at in read else Place(None, None, number)
                for at, claim, number in tickets
            }

        found.run(Line.settle)
        if not found.enough:
            found = (await self._mysql.look(session, {found.name: ()}, whole=True))[found.name]
            found.run(Line.settle)
        settled, seen = not found.changes(), found.run(rule)
        if settled and all(
            isinstance(place, Gone) or (at in waiting and place.token is None) for at, place in seen.items()
        ):
            return seen
        try:
            return await self._mysql.step(found.name, rule, [claim.owner for _, claim, _ in tickets], session)
        except RowTakenError:  # the transaction that has locked the line settles it
            return {at: Place(None, None, number, None, 0.0) for at, _, number in tickets if at in waiting}

    async def _keep_late(self, tickets: _Asked, answers: _Answers) -> None:
        """Wait for the rows, one after the other, and last for those that the last keep did not get."""
        self._held_up.intersection_update(claim.name for _, claim, _ in tickets)
        if not tickets:
            return
        store, name = self._mysql, ""
        try:
            async with asyncio.timeout(min(_ROW_PATIENCE, min(claim.ttl for _, claim, _ in tickets) / 15)):
                for at, claim, number in sorted(tickets, key=lambda each: each[1].name in self._held_up):
                    name, rule = claim.name, partial(_kept, claim, number)
                    with suppress(Exception):  # the others are kept, whatever it is
                        step = partial(store.step, name, rule, [claim.owner], waits=True)
                        answers[at] = await store.late_connection.run(step)
                    self._held_up.discard(name)
        except TimeoutError:
            self._held_up.add(name)
            store.late_connection.drop()  # its statement waits on, and the next keep would stand behind it

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`. It locks nothing: who may only look is answered."""
        asked = dict.fromkeys(filter(_storable, names), ())
        if not asked:
            return [()] * len(names)
        with translating("inspect"):
            found = await self._mysql.connection.run(lambda session: self._mysql.look(session, asked, whole=True))
        return [found[name].seen() if name in asked else () for name in names]

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`. It looks at `PAGE` names, most of which may be free."""
        with translating("list"):
            names = lines.names(prefix, cursor)
            (rest,) = await self._mysql.ask(f"{names} ORDER BY name LIMIT 1 OFFSET {PAGE - 1}")
            last = rest[0][0].decode() if rest else None
            to = "" if last is None else f" AND name <= {hexadecimal(last)}"
            used = f"{names}{to} AND (dies > {NOW} OR others = 1) ORDER BY name LIMIT {limit:d}"
            (found,) = await self._mysql.ask(used)
        page = [name.decode() for (name,) in found]
        return page, page[-1] if len(page) == limit else last

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._bells.add_and_listen(claim, bell, self._listen)

    @property
    def _client(self) -> str:
        """The name of this client in its tickets; "" if nothing can ring."""
        return "" if self._bell is None else self._bell.client

    def _listen(self) -> None:
        if self._bell is not None and self._mysql.connected:  # else the backend was closed meanwhile
            self._bell.open()

    async def aclose(self) -> None:
        """See `fencing_sdk.abc.Backend.aclose`."""
        await self._sweeper.task.aclose()
        if self._bell is not None and (asleep := await self._bell.aclose()) is not None:
            with suppress(Exception):  # it wakes within seconds, and finds its socket closed
                async with asyncio.timeout(_END_PATIENCE):
                    await self._mysql.connection.run(partial(end, number=asleep, client=self._client))
        await self._mysql.aclose()

    def schema_sql(self) -> str:
        """See ``abc._powers.SupportsSchema.schema_sql``."""
        return SCHEMA

    async def create_schema(self) -> None:
        """See ``abc._powers.SupportsSchema.create_schema``."""
        with translating("create_schema"):
            await (await self._mysql.dialer.dial(create=True)).aclose()


async def _take(session: MysqlSession, texts: Sequence[str], name: str) -> int:
    """Send the texts of `lines.take`; return the token, or 0 if the line has a ticket or its row is locked."""
    try:
        ((done, token, known),) = (await session.change(*texts))[-1]
        if not known:
            ((done, token, _),) = (await session.change(*lines.create(name), *texts))[-1]
    except ServerError as error:
        if code_of(error) not in LOCKED:
            raise
        return 0
    return token if done == 1 else 0


def _kept(claim: Claim, number: int, line: Line, now: float) -> Place | Gone:
    return line.keep(claim, now, number)


def _storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_url(url: str, **options: object) -> MysqlBackend:
    """
    Make a backend for a ``mysql://`` or ``mariadb://`` URL. `MysqlBackend` explains the options.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(MysqlBackend))
    return MysqlBackend(url.partition("?")[0], **chosen)
