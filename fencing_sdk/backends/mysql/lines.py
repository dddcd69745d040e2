"""
The rows of a line: how they are read, and what is written of them.

The rules run on rows that were read after the row of the name was locked. A client reads the first few tickets, and the
others only if all of those hold. What a rule has changed is one more text.

The first ticket of a line stands in the row of its name, and has an even number; the others have odd ones. A ticket
never moves. Each text locks rows in this order: the row of the name, then tickets.

1. A keep locks tickets, and not the row of their name. So who passes over a dead ticket has locked its row, and takes
   one whose row is locked for living: its owner is keeping it.
2. For the same reason a rule writes only the columns that it changed, and a life never becomes shorter by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from fencing_sdk._mysql.driver import Rows
from fencing_sdk._mysql.driver import hexadecimal as hx
from fencing_sdk._values.claim import Claim, Permit, Seen, holder_of, mode_named
from fencing_sdk._values.clock import TICK
from fencing_sdk.abc.line import Line, Row, TokenSource
from fencing_sdk.backends._shared.bells import message_for, message_of_end
from fencing_sdk.backends.mysql.connection import NOW, SECOND
from fencing_sdk.backends.mysql.errors import BACKEND
from fencing_sdk.errors import BackendRefusedError

# ruff: noqa: S608  (all values are numbers or hexadecimal literals)

T = TypeVar("T")
Tokens: TypeAlias = Callable[[int], TokenSource]
"""From microseconds of the server's clock to a source of tokens."""

FIRST = 8
"""Tickets of a line that are read at once."""
_FEW = 16
"""Names that are named one by one, at most."""
_SPARED = 0.25
"""Seconds for which a dead ticket counts as living because its row is locked."""
_MOST_MICROS = 2**53
_NAMES = ("number", "owner", "mode", "width", "label", "client", "token", "permit", "longest", "dies", "since")
_COLUMNS = ", ".join(_NAMES)
_DIES = _NAMES.index("dies")
_HEAD = f"last, drawn, others, {_COLUMNS}"


# Texts that read


def head(name: str) -> str:
    """Lock the row of a name, and read it, unless another transaction has locked it."""
    return f"SELECT {NOW}, name, {_HEAD} FROM fencing_line WHERE name = {hx(name)} FOR UPDATE SKIP LOCKED"


def wait_for(name: str) -> str:
    """Wait for the row of a name, and lock it; create it if it is missing."""
    return f"INSERT INTO fencing_line (name) VALUES ({hx(name)}) ON DUPLICATE KEY UPDATE last = last"


def create(name: str) -> list[str]:
    """Create the row of a name, unless there is one; an error if another transaction has locked or created it."""
    row = f"SELECT 1 FROM fencing_line WHERE name = {hx(name)}"
    insert = f"INSERT INTO fencing_line (name) SELECT {hx(name)} FROM DUAL WHERE NOT EXISTS ({row})"
    return [f"{row} FOR UPDATE NOWAIT", insert]


def heads(names: Iterable[str]) -> str:
    """Read the rows of names; one row has the time, even if no name is known."""
    among = ", ".join(map(hx, names))
    return f"SELECT {NOW}, name, {_HEAD} FROM (SELECT 1) AS always LEFT JOIN fencing_line ON name IN ({among})"


def tickets(owners: Mapping[str, Collection[str]], *, whole: bool = False) -> str:
    """Read the first tickets of each name, and those of these owners, wherever they stand; *whole*: all."""
    if whole:
        return f"SELECT name, 1, {_COLUMNS}, ended FROM fencing_ticket WHERE name IN ({', '.join(map(hx, owners))})"
    parts = list[str]()
    for name, asked in owners.items():
        where = f"WHERE name = {hx(name)}"
        first = f"FROM fencing_ticket FORCE INDEX (PRIMARY) {where} ORDER BY number LIMIT {FIRST:d}"
        parts.append(f"(SELECT name, 1, {_COLUMNS}, ended {first})")
        if asked:
            mine = f"FROM fencing_ticket {where} AND owner IN ({', '.join(map(hx, asked))})"
            parts.append(f"(SELECT name, 0, {_COLUMNS}, ended {mine})")
    return " UNION ALL ".join(parts)


def dead(name: str, numbers: Iterable[int]) -> str:
    """Lock those of the tickets that are dead, and that no owner keeps just now."""
    among = ", ".join(map(str, numbers))
    return (
        f"SELECT number FROM fencing_ticket WHERE name = {hx(name)} AND number IN ({among})"
        f" AND LEAST(dies, {NOW} + longest) <= {NOW} FOR UPDATE SKIP LOCKED"
    )


# Texts that decide where a line has one ticket, or none: what others have locked is passed over, and nothing is locked
# between two texts. The name comes out of the first statement, so that the second one waits for no row.

_FREE = f"others = 0 AND dies <= {NOW}"
_FREED = "owner = '', label = NULL, dies = 0"


def take(claim: Claim, client: str, *, hybrid: bool) -> list[str]:
    """Draw the only ticket of a line, if it has none. The answer: 1 if so, the token, whether the row exists."""
    name, micros = hx(claim.name), micros_of(claim.ttl)
    token = f"GREATEST(last + 1, {NOW} DIV {TICK})" if hybrid else "last + 1"
    texts = claim.owner, claim.mode.word, claim.mode.width, claim.label, client
    owner, mode, width, label, client = map(_literal, texts)
    permit = "0" if isinstance(claim.mode, Permit) else "NULL"
    return [
        _unlocked(f"name = {name} AND {_FREE}"),
        (
            f"UPDATE fencing_line SET last = LAST_INSERT_ID({token}), number = 2 * last, owner = {owner},"
            f" mode = {mode}, width = {width}, label = {label}, client = {client}, token = last, permit = {permit},"
            f" longest = {micros:d}, dies = {NOW} + {micros:d}, since = {NOW}"
            f" WHERE name = {name} AND name = @fencing_name AND {_FREE}"
        ),
        f"SELECT ROW_COUNT(), LAST_INSERT_ID(), EXISTS(SELECT 1 FROM fencing_line WHERE name = {name})",
    ]


def leave(claim: Claim) -> list[str]:
    """Give back the only ticket of a line, if it is that of *claim*. The answer: whether it was."""
    mine = f"name = {hx(claim.name)} AND others = 0 AND owner = {hx(claim.owner)} AND dies > {NOW}"
    update = f"UPDATE fencing_line SET {_FREED} WHERE name = @fencing_name AND {mine}"
    return [_unlocked(mine), update, "SELECT ROW_COUNT()"]


def _unlocked(which: str) -> str:
    return f"SELECT MAX(name) INTO @fencing_name FROM fencing_line WHERE {which} FOR UPDATE SKIP LOCKED"


# Texts that keep


Numbered: TypeAlias = tuple[str, int]
"""Name and number of a ticket."""


def lock_kept(tickets: Sequence[Numbered]) -> list[str]:
    """Lock and read tickets by their numbers, except those that another transaction has locked."""
    columns = f"{NOW}, name, number, owner, dies, longest, token, permit"
    read = [f"SELECT {columns}, {ended} FROM {table} WHERE {those}" for table, ended, those in _of(tickets)]
    return [f"{text} FOR UPDATE SKIP LOCKED" for text in read]


def lives(owner: str, row: Sequence[Any]) -> bool:
    """Return whether a row of an answer to `lock_kept` is a living ticket of *owner*."""
    now, _, _, its_owner, dies, longest, _, _, ended = row
    return bool(its_owner == owner.encode() and ended is None and min(dies, now + longest) > now)


def live_on(tickets: Sequence[Numbered], micros: int) -> list[str]:
    """Take a sign of life of tickets that are locked."""
    lives = (
        f"dies = LEAST(GREATEST(dies, {NOW} + {micros:d}), {NOW} + GREATEST(longest, {micros:d})),"
        f" longest = GREATEST(longest, {micros:d})"
    )
    return [f"UPDATE {table} SET {lives} WHERE {those}" for table, _, those in _of(tickets)]


def _of(tickets: Sequence[Numbered]) -> list[tuple[str, str, str]]:
    """
    Return where tickets stand in each table.

    Both servers make ranges of many pairs, and not of so many ORs. But MariaDB reads a whole line for a few pairs.
    """
    alone = ", ".join(hx(name) for name, number in tickets if number % 2 == 0)
    others: dict[str, list[str]] = {}
    for name, number in tickets:
        if number % 2:
            others.setdefault(hx(name), []).append(f"{number:d}")
    found = [("fencing_line", "NULL", f"name IN ({alone})")] if alone else []
    if len(others) > _FEW:
        pairs = ", ".join(f"({name}, {number})" for name, numbers in others.items() for number in numbers)
        found.append(("fencing_ticket", "ended", f"(name, number) IN ({pairs})"))
    elif others:
        each = (f"(name = {name} AND number IN ({', '.join(numbers)}))" for name, numbers in others.items())
        found.append(("fencing_ticket", "ended", " OR ".join(each)))
    return found


def names(prefix: str, after: str | None) -> str:
    """Read the names with a prefix; more conditions may follow. UTF-8 has no byte 0xFF, so none is above it."""
    start = f"name >= {hx(prefix)}" if after is None else f"name > {hx(after)}"
    return f"SELECT name FROM fencing_line WHERE {start} AND name < CONCAT({hx(prefix)}, x'ff')"


class NameLine:
    """
    The line of one name as it was read, and the texts that write what a rule has changed.

    Its moments are seconds from now on, so that a float holds them exactly: for the rules it is 0.0.

    Args:
        name: The name.

        row: The row of an answer to `head` or `heads`.

        found: The rows of an answer to `tickets` that are of this name.

        tokens: How tokens grow, by microseconds of the server's clock.

        whole: True if all were read.
    """

    def __init__(self, name: str, row: Sequence[Any], found: Rows, tokens: Tokens, *, whole: bool = False) -> None:
        self.name = name
        self._now: int
        self._now, known, last, self._drawn, self._others, *slot = row
        if known is None:
            last, self._drawn, self._others = 0, 0, 0
        self.line = Line(tokens(self._now), last)
        self._last = last
        self._first = {number for _, first, number, *_ in found if first}
        self._whole = whole or len(self._first) < FIRST
        self._rows: dict[int, tuple[Row, tuple[Any, ...]]] = {}
        self._reasons: dict[str, int] = {}
        self._over: list[int] = []
        if slot[_DIES]:
            self._add(slot)
        for number, columns, ended in sorted({row[2]: (row[2], row[2:-1], row[-1]) for row in found}.values()):
            if ended is None:
                self._add(columns)
            elif columns[_DIES] <= self._now:
                self._over.append(number)
            else:
                owner = columns[1].decode()
                self.line.ended[owner] = self._from_now(columns[_DIES]), ended.decode()
                self._reasons[owner] = number

    def _add(self, columns: Sequence[Any]) -> None:
        number, owner, word, width, label, client, token, permit, longest, dies, since = columns
        life = self._from_now(dies), longest / SECOND, self._from_now(since)
        mode, label = mode_named(word.decode(), width), None if label is None else label.decode()
        row = Row(owner.decode(), mode, label, number, *life, token, permit, client.decode())
        self.line.rows[row.owner] = row
        self._rows[number] = row, self._values(row)

    def _from_now(self, moment: int) -> float:
        return (moment - self._now) / SECOND

    def _moment(self, seconds: float) -> int:
        return self._now + round(seconds * SECOND)

    def _values(self, row: Row) -> tuple[Any, ...]:
        """The columns of a row."""
        times = round(row.longest * SECOND), self._moment(row.dies), self._moment(row.since)
        mode, client = row.mode, str(row.address or "")
        return row.number, row.owner, mode.word, mode.width, row.label, client, row.token, row.permit, *times

    @property
    def dead(self) -> list[int]:
        """The numbers of tickets that are dead, unless their owner keeps them just now."""
        return [number for number, (row, _) in self._rows.items() if number % 2 and min(row.dies, row.longest) <= 0]

    def spare(self, numbers: Iterable[int]) -> None:
        """Take these tickets for living: their rows are locked."""
        for number in numbers:
            row, _ = self._rows[number]
            row.dies = row.longest = _SPARED
            self._rows[number] = row, self._values(row)

    def run(self, rule: Callable[[Line, float], T]) -> T:
        """Run a *rule*. If the next ticket is alone, it will stand in the row of the name, and have an even number."""
        alone = self._whole and not any(min(row.dies, row.longest) > 0 for row in self.line.rows.values())
        self.line.drawn = 2 * self.line.next_token(self._last) - 1 if alone else 2 * self._drawn
        return rule(self.line, 0.0)

    @property
    def enough(self) -> bool:
        """True if a rule that ran has met all who hold: some ticket waits, or all tickets were read."""
        return self._whole or any(row.token is None and row.number in self._first for row in self.line.rows.values())

    def seen(self) -> list[Seen]:
        """Return the living tickets, as they are written: a look settles nothing."""
        living = [(row, left) for row in self.line.rows.values() if (left := min(row.dies, row.longest)) > 0]
        return [
            Seen(holder_of(row.owner), row.mode, row.token, row.permit, left, -row.since, row.label)
            for row, left in sorted(living, key=lambda each: each[0].token is None)
        ]

    @property
    def crowded(self) -> bool:
        """True if the line has tickets, or reasons, besides the row of its name."""
        return not self._whole or bool(self.line.ended) or any(row.number % 2 for row in self.line.rows.values())

    def changes(self) -> list[str]:
        """The texts that write what a rule has changed."""
        line, living = self.line, {row.number: row for row in self.line.rows.values()}
        at, texts = f"name = {hx(self.name)}", list[str]()
        over = self._over + [number for owner, number in self._reasons.items() if owner not in line.ended]
        for number, (row, before) in self._rows.items():
            if number in living:
                if number % 2 and (changed := _changed(before, self._values(row))):
                    texts.append(f"UPDATE fencing_ticket SET {changed} WHERE {at} AND number = {number:d}")
            elif row.owner in line.ended and row.owner not in self._reasons:
                until, reason = line.ended[row.owner]
                if number % 2:
                    ended = f"ended = {hx(reason)}, dies = {self._moment(until):d}"
                    texts.append(f"UPDATE fencing_ticket SET {ended} WHERE {at} AND number = {number:d}")
                else:
                    row.dies = until
                    texts.append(self._insert(row, hx(reason)))
            elif number % 2:
                over.append(number)
        if over:
            texts.insert(0, f"DELETE FROM fencing_ticket WHERE {at} AND number IN ({', '.join(map(str, over))})")
        fresh = [row for number, row in living.items() if number % 2 and number not in self._rows]
        texts += [self._insert(row, "NULL") for row in fresh]
        if columns := self._changed_head(living, len(fresh)):
            texts.append(f"UPDATE fencing_line SET {columns} WHERE {at}")
        return texts

    def _insert(self, row: Row, ended: str) -> str:
        values = ", ".join(map(_literal, (self.name, *self._values(row))))
        return f"INSERT INTO fencing_ticket (name, {_COLUMNS}, ended) VALUES ({values}, {ended})"

    def _changed_head(self, living: Mapping[int, Row], fresh: int) -> str:
        """The columns of the row of the name, which is locked: its ticket is written as it is."""
        columns = []
        if self.line.last != self._last:
            columns.append(f"last = {self.line.last:d}")
        if fresh:
            columns.append(f"drawn = {self._drawn + fresh:d}")
        if self.crowded != bool(self._others):
            columns.append(f"others = {self.crowded:d}")
        before = next((values for number, (_, values) in self._rows.items() if number % 2 == 0), None)
        row = next((row for number, row in living.items() if number % 2 == 0), None)
        after = None if row is None else self._values(row)
        if before is not None and after is None:
            columns.append(_FREED)
        elif after is not None and after != before:
            columns += [f"{name} = {_literal(value)}" for name, value in zip(_NAMES, after, strict=True)]
        return ", ".join(columns)


def news(rung: Iterable[Row], asked_by: Collection[str]) -> list[tuple[str, str]]:
    """The messages, each with its client, for tickets that have begun to hold, except those whose owners ask."""
    return [(str(row.address), message_for(row)) for row in rung if row.address and row.owner not in asked_by]


def news_of_end(over: Iterable[Row], reason: str) -> list[tuple[str, str]]:
    """The messages for tickets that an operator has ended."""
    return [(str(row.address), message_of_end(row, reason)) for row in over if row.address]


def _changed(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Return the columns that a rule has changed: a keep may have prolonged the ticket since it was read."""
    columns, same_owner = [], before[1] == after[1]
    for name, old, new in zip(_NAMES, before, after, strict=True):
        if new != old:
            text = _literal(new)
            if same_owner and name in {"longest", "dies"}:  # else it changes hands, or stands for so long
                # The clock was set back if a life is shorter. Columns are assigned one after the other.
                text = f"GREATEST({name}, {text})" if new > old else f"LEAST(dies, {NOW} + longest)"
            columns.append(f"{name} = {text}")
    return ", ".join(columns)


def micros_of(seconds: float) -> int:
    """Round up, because the server may keep a ticket for longer than its ttl, but never for less."""
    if not seconds * SECOND < _MOST_MICROS:
        raise BackendRefusedError(BACKEND, "acquire", "the ttl is too large to be stored")
    return math.ceil(seconds * SECOND)


def _literal(value: str | int | None) -> str:
    return "NULL" if value is None else hx(value) if isinstance(value, str) else f"{value:d}"
