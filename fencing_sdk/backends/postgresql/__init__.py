"""
Locks in PostgreSQL, beside the data that they protect.

    connect("postgresql://user:password@localhost:5432/app")
    connect("postgresql://db1,db2,db3/app?sslmode=verify-full")   # the host that takes writes

Tokens: hybrid by default, kept in the line's row. Clock: the server's, read while the row is locked. Waiters: first
come, first served, rung by NOTIFY. One connection for the requests, and one that listens while a ticket waits or holds.

    __init__.py    the backend, its options and its URL; deletes rows that are no longer needed
    listener.py    the connection on which bells ring
    dial.py        opens a session with the server that takes writes; the connection for the requests
    driver.py      the part of asyncpg that is used, with types, and one open connection
    schema.sql     the tables, and the functions that decide
    schema.py      creates them
    errors.py      translates errors of the driver to those of the contract
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen, mode_named
from fencing_sdk._values.clock import JITTER, BootClock, wall_seconds
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import (
    LIBPQ_OPTIONS,
    option_names,
    read_hybrid,
    read_postgresql_url,
    read_seconds,
    read_switch,
)
from fencing_sdk.abc import ALL_MODES, Bell, Kept
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.bells import Bells
from fencing_sdk.backends.postgresql.dial import PostgresqlConnection, PostgresqlDialer
from fencing_sdk.backends.postgresql.driver import DriverRow
from fencing_sdk.backends.postgresql.errors import BACKEND, UnreadableRowError, translating
from fencing_sdk.backends.postgresql.listener import NotifyListener
from fencing_sdk.backends.postgresql.schema import DEFAULT_SCHEMA, check_schema, quoted, schema_sql
from fencing_sdk.errors import BackendRefusedError, ConfigurationError

__all__ = ["PostgresqlBackend", "from_url", "schema_sql"]

_OF_LIBPQ = """
    host port dbname user password passfile sslmode sslcert sslkey sslrootcert sslcrl sslpassword
    ssl_min_protocol_version ssl_max_protocol_version target_session_attrs application_name options
"""
DRIVER_OPTIONS = tuple(_OF_LIBPQ.split())
"""
The options of a URL's query, or of `connect`, that belong to libpq and not to the backend.

Any other option is an error: asyncpg would take it for a setting of the server, and a typing error must not turn TLS
off.
"""
_EVERY = 600.0
"""Seconds between two sweeps of one client."""
_RETENTION = 7 * 86400.0
"""Seconds for which a name must have been free before its row is deleted."""
_CLOCK = BootClock()
_BATCH = 1000
"""Tickets that one statement keeps."""
_MOST_MICROS = 2**53


class PostgresqlBackend(Uncopied):
    """
    A lock service in PostgreSQL, from version 12 on.

    Args:
        url: ``postgresql://user:password@host:port/database``; separate several hosts by commas, and the
            backend uses the one that takes writes. Its query has options of libpq, such as ``sslmode``.

        schema: The schema of the tables and functions.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which repeat when the server loses the last grants.

        create: Whether the first call that misses the tables and functions creates them.

        pooled: Whether a proxy gives every transaction to another server process. The backend notices this
            by itself; with ``pooled=True`` it saves the first error in the server's log.

        connect_timeout: Seconds that the opening of a connection may take.

        driver: More arguments of ``asyncpg.connect``, such as ``ssl`` or a callable ``password``.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    modes = ALL_MODES
    rings = True

    def __init__(
        self,
        url: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        tokens: str = "hybrid",
        create: bool = True,
        pooled: bool = False,
        connect_timeout: float = 4.0,
        driver: Mapping[str, object] | None = None,
    ) -> None:
        given: object = url
        if not isinstance(given, str):
            msg = f"url must be a str, such as 'postgresql://localhost/app', not {type(url).__name__}"
            raise ConfigurationError(msg)
        parts = read_postgresql_url(url, known=DRIVER_OPTIONS)
        self._hybrid = read_hybrid(tokens)
        self._dialer = PostgresqlDialer(
            parts.each_host(),
            schema=check_schema(schema),
            create=read_switch("create", create),
            pooled=read_switch("pooled", pooled),
            patience=read_seconds("connect_timeout", connect_timeout),
            arguments=driver or {},
        )
        self._connection = PostgresqlConnection(self._dialer)
        self._bells = Bells()
        self._listener = NotifyListener(self._dialer, self._connection, self._bells)
        self._sweep = BackgroundTask()
        self._sweep_due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        name = quoted(schema)
        self._draw = f"SELECT * FROM {name}.fencing_draw($1, $2, $3, $4, $5, $6, $7, $8, $9)"  # noqa: S608
        # For an array of numbers, asyncpg asks the server on each connection, by names in the search_path of the role.
        numbers = "pg_catalog.text[]::bigint[]"
        self._keep = (
            "SELECT k.tokens::pg_catalog.text[], k.permits::pg_catalog.text[], k.numbers::pg_catalog.text[], k.places"  # noqa: S608
            f" FROM {name}.fencing_keep($1, $2, $3::{numbers}, $4::{numbers}, $5) k"
        )
        self._give_back = f"SELECT * FROM {name}.fencing_give_back($1, $2, $3, $4)"  # noqa: S608
        self._pass_on = f"SELECT * FROM {name}.fencing_pass_on($1, $2, $3, $4, $5, $6, $7)"  # noqa: S608
        self._end = f"SELECT {name}.fencing_end($1, $2, $3, $4)"
        self._seen = f"SELECT {name}.fencing_seen($1)"
        self._names = f"SELECT {name}.fencing_names($1, $2, $3)"
        self._sweeping = f"SELECT {name}.fencing_sweep($1)"

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await self._connection.ask("SELECT 1", ())

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        if not (storable(claim.name) and (claim.label is None or storable(claim.label))):
            raise BackendRefusedError(BACKEND, "acquire", "a name or a label has a NUL or a lone surrogate; escape it")
        channel = self._listener.name_channel()
        asked = (claim.mode.word, claim.mode.width, claim.label, _micros(claim.ttl), channel, only_if_it_holds)
        with translating("acquire"):
            row = await self._connection.ask(self._draw, (claim.name, claim.owner, *asked, self._hybrid))
            token, permit, number, look_after = _columns(row, 4)
            if number is None:
                return Busy(None if look_after is None else max(0.0, look_after))
            place = _place(token, permit, number, look_after)
        if place.token is None:
            self._listener.open()
        if _CLOCK.now() >= self._sweep_due:
            self._sweep_due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self._sweep.start(self._delete_old_rows)
        return place

    async def _delete_old_rows(self) -> None:
        before = int((wall_seconds() - _RETENTION) * 1e5) if self._hybrid else 0
        with suppress(Exception):  # a later sweep deletes the same rows
            await self._connection.ask(self._sweeping, (before,))

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """
        See `fencing_sdk.abc.Backend.keep`.

        One statement keeps a batch. If it fails, its tickets have no answer, and the other batches keep theirs. If all
        fail, so does the call.
        """
        answers: list[Place | Gone | None] = [Gone()] * len(tickets)
        asked = [at for at, (claim, _) in enumerate(tickets) if storable(claim.name)]
        failures: list[Exception] = []
        batches = [asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH)]
        for batch in batches:
            found: Sequence[Place | Gone | None]
            try:
                found = await self._keep_batch([tickets[at] for at in batch])
            except Exception as error:  # noqa: BLE001  (it is raised below, unless another batch has answers)
                failures.append(error)
                found = [None] * len(batch)
            for at, answer in zip(batch, found, strict=True):
                answers[at] = answer
        if failures and len(failures) == len(batches):
            with translating("renew"):
                raise failures[0]
        self._listener.open()
        return answers

    async def _keep_batch(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        names, owners = [claim.name for claim, _ in tickets], [claim.owner for claim, _ in tickets]
        numbers, ttls = [str(number) for _, number in tickets], [str(_micros(claim.ttl)) for claim, _ in tickets]
        row = await self._connection.ask(self._keep, (names, owners, numbers, ttls, self._hybrid), urgent=True)
        tokens, permits, found, places = _columns(row, 4)
        if places is not None:
            return [_place_or_gone(**place) for place in json.loads(places)]
        if tokens is None or len(tokens) != len(tickets):
            raise UnreadableRowError
        columns = [[_int_or_none(digits) for digits in column] for column in (tokens, permits, found)]
        return [_place(token, permit, number, None) for token, permit, number in zip(*columns, strict=True)]

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        asked = (claim.name, claim.owner, _micros(after), self._hybrid)
        with translating("release"):
            row = await self._connection.ask(self._give_back, asked, urgent=True, must_run=True)
            was, ended, taken = _columns(row, 3)
        return None if was else Gone(ended, bool(taken))

    async def pass_on(self, claim: Claim, heir: Claim) -> Place | Gone:
        """See `fencing_sdk.abc.PassesOn.pass_on`."""
        channel = self._listener.name_channel()
        asked = (claim.name, claim.owner, heir.owner, heir.label, _micros(heir.ttl), channel, self._hybrid)
        with translating("transfer"):
            token, permit, number, look_after, ended, taken = _columns(
                await self._connection.ask(self._pass_on, asked), 6
            )
            return Gone(ended, bool(taken)) if number is None else _place(token, permit, number, look_after)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        with translating("revoke"):
            (ended,) = _columns(await self._connection.ask(self._end, (name, token, reason, self._hybrid)), 1)
        return ended is True

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        with translating("inspect"):
            (found,) = _columns(await self._connection.ask(self._seen, (list(names),)), 1)
            return [[_seen(*ticket) for ticket in line] for line in json.loads(found or "[]")]

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        if not storable(prefix):
            return (), None
        with translating("list"):
            (page,) = _columns(await self._connection.ask(self._names, (prefix, cursor or "", limit)), 1)
        return page or (), page[-1] if page and len(page) == limit else None

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._bells.add_and_listen(claim, bell, self._listener.open)

    async def aclose(self) -> None:
        """See `fencing_sdk.abc.Backend.aclose`."""
        await self._sweep.aclose()
        await self._listener.aclose()
        await self._connection.aclose()

    def schema_sql(self) -> str:
        """See ``abc._powers.SupportsSchema.schema_sql``."""
        return schema_sql(self._dialer.schema)

    async def create_schema(self) -> None:
        """See ``abc._powers.SupportsSchema.create_schema``."""
        with translating("create_schema"):
            await (await self._dialer.dial(missing="create_schema")).aclose()


def storable(text: str) -> bool:
    """Return whether PostgreSQL can store *text*, as far as that is the same in every encoding."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _micros(seconds: float) -> int:
    """Round up, because the server may keep a ticket for longer than its ttl, but never for less."""
    if not seconds * 1e6 < _MOST_MICROS:
        raise BackendRefusedError(BACKEND, "acquire", "the ttl is too large to be stored")
    return math.ceil(seconds * 1e6)


def _columns(row: DriverRow | None, count: int) -> Any:
    """Return the columns of an answer. A function with more or fewer belongs to another program."""
    found = () if row is None else tuple(row)
    if len(found) != count:
        raise UnreadableRowError
    return found


def _int_or_none(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _place(token: object, permit: object, number: object, look_after: object) -> Place:
    if not (isinstance(token, int | None) and isinstance(permit, int | None) and isinstance(number, int)):
        raise UnreadableRowError
    after = math.inf if look_after is None else max(0.0, float(look_after))  # type: ignore[arg-type]
    return Place(token, permit, number, None, after)


def _place_or_gone(  # noqa: PLR0917  (the columns of a row)
    token: object, permit: object, number: object, look_after: object, ended: str | None, taken: object
) -> Place | Gone:
    return Gone(ended, bool(taken)) if number is None else _place(token, permit, number, look_after)


def _seen(  # noqa: PLR0917  (the columns of a row)
    holder: str,
    word: str,
    width: int,
    token: int | None,
    permit: int | None,
    remaining: float,
    since: float,
    label: str | None,
) -> Seen:
    return Seen(holder, mode_named(word, width), token, permit, remaining, since, label)


def from_url(url: str, **options: object) -> PostgresqlBackend:
    """
    Make a backend for a ``postgresql://`` URL. `PostgresqlBackend` explains the options, which the query may contain.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(PostgresqlBackend, besides={"driver"})
    chosen = take_options(url, options, (*ours, *DRIVER_OPTIONS), public=LIBPQ_OPTIONS)
    own: dict[str, Any] = {name: chosen.pop(name) for name in ours if name in chosen}
    for name, value in chosen.items():  # what remains are the driver's
        if not isinstance(value, str) or not value:
            msg = f"{name} must be a non-empty str"
            raise ConfigurationError(msg)
    rest, _, query = url.partition("?")
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in {*ours, *chosen}]
    query = urlencode([*pairs, *chosen.items()], quote_via=quote, errors="surrogatepass")
    return PostgresqlBackend(f"{rest}?{query}" if query else rest, **own)
