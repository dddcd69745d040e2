"""
The rows of the server as texts: how they are read, and how the changes of a rule are written.

A transaction has two texts. The first one locks the row of its name and reads all that a rule may ask for, into a table
in memory. The rule runs on that table. What it has changed is the second text, which commits. A name that is new costs
one text more, which creates its row.

The row is locked by a reading that passes over what another transaction has locked. The statement that waits for it is
an upsert, because ``INSERT IGNORE`` takes a shared lock first: two sessions that do so often end in a deadlock.

All values are numbers or hexadecimal literals, so no text of a caller can end a literal.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fencing_sdk._mysql.driver import Rows, hexadecimal
from fencing_sdk._values.claim import mode_named, permits_of
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_backend import WaiterAddress
from fencing_sdk.backends._shared.row_table import RowTable, TableRows
from fencing_sdk.backends._shared.rules import GrantRow, TokenSource, WaiterRow

T = TypeVar("T")

SECOND = 1_000_000
"""Microseconds, in which the server's tables count time."""
PAGE = 10_000
"""Names that one statement of a listing looks at, most of which may be free: renewals wait for it."""
NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
"""When the statement began: not before the rows were locked, because a statement that waits for one reads no time."""


_COLUMNS = "(name, token, held_until, grants)"


def lock(name: str) -> str:
    """Wait for the row of *name*, and lock it; create it if it is missing."""
    row = f"({hexadecimal(name)}, 0, {NOW}, '[]')"
    return f"INSERT INTO fencing_lock {_COLUMNS} VALUES {row} ON DUPLICATE KEY UPDATE token = token"  # noqa: S608


def create(name: str) -> list[str]:
    """Create the row of *name* if it is missing. The first statement fails if another client is about to do that."""
    key = hexadecimal(name)
    row = f"SELECT 1 FROM fencing_lock WHERE name = {key}"  # noqa: S608
    insert = f"INSERT INTO fencing_lock {_COLUMNS} SELECT {key}, 0, {NOW}, '[]' FROM DUAL"  # noqa: S608
    return [f"{row} FOR UPDATE NOWAIT", f"{insert} WHERE NOT EXISTS ({row})"]


class NotReadError(Exception):
    """A rule asks why a grant was ended, and that was not read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What of the names is read, in the order of the statements."""

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
    """Reasons that were not read."""

    def get(self, *_: object) -> NoReturn:
        raise NotReadError


class NameRows:
    """The rows of one name as they were read, and the changes of the rule that runs on them."""

    def __init__(self, table: RowTable, name: str, now: float) -> None:
        self._table = table
        self._name = name
        self._now = now
        self._rows = TableRows(table, name, now)
        self._token = table.last_token
        self._held = self._grants_text()
        self._waiting = set(table.lines.get(name, ()))
        self._reasons = dict(table.reasons)

    @classmethod
    def of_answers(
        cls, reading: Reading, answers: Sequence[Rows], tokens: Callable[[float], TokenSource], backend: str
    ) -> Callable[[str], NameRows]:
        """
        Take the *answers* to a *reading*; return the rows of any of the names.

        Args:
            reading: What was read.

            answers: The rows of each statement; none if nothing was.

            tokens: From the time to how tokens grow.

            backend: What errors call the store.
        """
        rest = iter(answers)
        locks = next(rest, ())
        waiters, ended = next(rest, ()) if reading.line else (), next(rest, ()) if reading.reasons else ()
        now = int(locks[0][0]) / SECOND if locks else math.nan
        known = {_text(name): (token, grants) for _, name, token, grants in locks if name is not None}
        lines: dict[str, OrderedDict[str, WaiterRow]] = {}
        for name, waiter in map(_waiter, waiters):
            lines.setdefault(name, OrderedDict())[waiter.owner] = waiter
        why = {(_text(name), _text(owner)): (until / SECOND, _text(text)) for name, owner, until, text in ended}

        def rows_of(name: str) -> NameRows:
            token, grants = known.get(name, (0, "[]"))
            table = RowTable(tokens(now), backend)
            table.last_token = token
            if held := {row.owner: row for row in map(_grant, json.loads(grants))}:
                table.grants[name] = held
            if name in lines:
                table.lines[name] = lines[name]
            table.reasons = {key: kept for key, kept in why.items() if key[0] == name} if reading.reasons else _Unread()
            return cls(table, name, now)

        return rows_of

    def apply(self, rule: Callable[[rules.Rows], T]) -> T:
        """Run *rule*."""
        return rule(self._rows)

    @property
    def woken(self) -> WaiterAddress | None:
        """Whom the rule wakes, where the waiter can be reached."""
        waiter = self._rows.woken
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
            yield from _joining(name, line[owner], micros)
        for (_, owner), (until, reason) in self._table.reasons.items() - self._reasons.items():
            values = f"{name}, {hexadecimal(owner)}, {math.ceil(until * SECOND):d}, {hexadecimal(reason)}"
            yield f"REPLACE INTO fencing_revoked (name, owner, until, reason) VALUES ({values})"  # noqa: S608
        if (address := self.woken) is not None:
            yield message([address.box], address.ticket)

    def _grants_text(self) -> str:
        return json.dumps([_grant_object(row) for row in self._table.grants.get(self._name, {}).values()])


def message(clients: Collection[str], text: str) -> str:
    """Leave a message for each of the *clients*: see `bell`."""
    rows = ", ".join(f"({hexadecimal(client)}, {hexadecimal(text)}, {NOW})" for client in clients)
    return f"INSERT INTO fencing_bell (client, message, sent) VALUES {rows}"  # noqa: S608


def sign_of_life(group: str) -> str:
    """Note that a group of waiters lives."""
    return (
        f"INSERT INTO fencing_sign (waiter_group, seen) VALUES ({hexadecimal(group)}, {NOW})"  # noqa: S608
        f" ON DUPLICATE KEY UPDATE seen = {NOW}"
    )


def standing(group: str) -> str:
    """Read which waiters of a *group* stand in their lines, for `read_standing`."""
    return f"SELECT name, owner FROM fencing_waiter WHERE waiter_group = {hexadecimal(group)}"  # noqa: S608


def read_standing(rows: Rows) -> set[tuple[str, str]]:
    """Each waiter of a group, by name and owner."""
    return {(_text(name), _text(owner)) for name, owner in rows}


def end_of_page(prefix: str, after: str | None) -> str:
    """Read the last one of the next `PAGE` names that begin with *prefix*; where there are fewer, nothing."""
    return f"SELECT name FROM fencing_lock WHERE {_among(prefix, after)} ORDER BY name LIMIT 1 OFFSET {PAGE - 1}"  # noqa: S608


def held_names(prefix: str, after: str | None, last: str | None, limit: int) -> str:
    """Read the next *limit* names that begin with *prefix*, are not behind *last*, and may be held."""
    among = _among(prefix, after) if last is None else f"{_among(prefix, after)} AND name <= {hexadecimal(last)}"
    return f"SELECT name FROM fencing_lock WHERE {among} AND held_until > {NOW} ORDER BY name LIMIT {limit:d}"  # noqa: S608


def _among(prefix: str, after: str | None) -> str:
    start = f"name >= {hexadecimal(prefix)}" if after is None else f"name > {hexadecimal(after)}"
    # UTF-8 has no byte 0xFF, so no name with this prefix is above it.
    return f"{start} AND name < CONCAT({hexadecimal(prefix)}, x'ff')"


def read_names(rows: Rows) -> list[str]:
    """The names of an answer."""
    return [_text(name) for (name,) in rows]


def known_names(rows: Rows) -> list[str]:
    """The names that have a row, of an answer to the first of `Reading.texts`."""
    return [_text(name) for _, name, *_ in rows if name is not None]


def _joining(name: str, waiter: WaiterRow, now: int) -> Iterator[str]:
    address = waiter.address
    assert isinstance(address, WaiterAddress)
    texts = (waiter.owner, address.group, address.box, address.ticket, waiter.mode.word)
    permits = "NULL" if (number := permits_of(waiter.mode)) is None else f"{number:d}"
    label = "NULL" if waiter.label is None else hexadecimal(waiter.label)
    yield (
        "INSERT INTO fencing_waiter (name, owner, waiter_group, box, ticket, mode, permits, since, label) VALUES"  # noqa: S608
        f" ({name}, {', '.join(map(hexadecimal, texts))}, {permits}, {now:d}, {label})"
    )
    yield sign_of_life(address.group)


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
