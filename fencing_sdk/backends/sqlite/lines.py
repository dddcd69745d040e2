"""
The lines in the open file: one row of JSON for each name, read and written within a transaction.

All tickets of another boot are dead, because their owners are. A name whose row is gone has no tickets; the last token
is a row apart, so that a row may be deleted at any time after its last ticket died.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TypeVar

from fencing_sdk._values.claim import mode_named, permits_of
from fencing_sdk.abc.line import Line, Row, TokenSource
from fencing_sdk.backends._shared.bells import message_for
from fencing_sdk.backends.sqlite.file import LockFile

T = TypeVar("T")
Step = tuple[str, Callable[[Line, float], T]]
"""A name, and a verb on its line at a moment."""
Message = tuple[str, str]
"""The socket of a client, and what it is to hear."""

_REST = attrgetter(*(field.name for field in fields(Row)[2:]))
"""Columns of a ticket after owner and mode; `dataclasses.astuple` copies each value, which takes half of a keep."""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_READ = "SELECT line FROM fencing_line WHERE name = :name AND boot = :boot"
_WRITE = "INSERT OR REPLACE INTO fencing_line VALUES (:name, :boot, :dies, :line)"
_DELETE = "DELETE FROM fencing_line WHERE name = :name"
_SWEEP = "DELETE FROM fencing_line WHERE boot <> :boot OR dies <= :now"
_NAMES = (
    "SELECT name FROM fencing_line WHERE boot = :boot AND name >= :prefix AND name > :after ORDER BY name LIMIT :limit"
)


class LineFile:
    """The open file, as seen from one boot; for the thread that made it alone."""

    def __init__(self, file: LockFile, next_token: TokenSource, boot: str) -> None:
        self.file = file
        self._next_token = next_token
        self._boot = boot
        self._drawn = False  # whether this transaction has drawn a token

    def run(self, steps: Sequence[Step[T]], *, draws: bool = False) -> tuple[list[T], list[Message]]:
        """
        Carry out *steps* in one transaction; return their answers, and the messages to be sent.

        A token that was drawn is on the disk before it is answered or sent: a power failure ends all tickets, and must
        not forget the last token. *draws*: a step may well draw one.
        """
        answers: list[T] = []
        messages: list[Message] = []
        self._drawn = False
        durable = draws and any(not self._read(name) for name, _ in steps)
        with self.file.transaction(durable=durable) as now:
            for name, those in groupby(steps, itemgetter(0)):
                before = self._read(name)
                line = self._load(before)
                answers += [step(line, now) for _, step in those]
                messages += [(str(row.address), message_for(row)) for row in line.rung if row.address]
                self._save(name, before, line)
        if self._drawn and not durable:
            with self.file.transaction(durable=True):
                self.file.execute("UPDATE fencing_token SET last = last")
        return answers, messages

    def _read(self, name: str) -> str:
        found = self.file.execute(_READ, name=name, boot=self._boot).fetchone()
        return "" if found is None else str(found[0])

    def _load(self, text: str) -> Line:
        line = Line(self._draw_token)
        if not text:  # numbers go on beyond those of earlier tickets
            (line.drawn,) = self.file.execute("SELECT last FROM fencing_token").fetchone()
        else:
            line.drawn, rows, ended = json.loads(text)
            for owner, word, width, *rest in rows:
                line.rows[owner] = Row(owner, mode_named(word, width), *rest)
            line.ended = {owner: (until, reason) for owner, (until, reason) in ended.items()}
        return line

    def _save(self, name: str, before: str, line: Line) -> None:
        if not line.rows and not line.ended:
            if before:
                self.file.execute(_DELETE, name=name)
            return
        rows = [[row.owner, row.mode.word, permits_of(row.mode), *_REST(row)] for row in line.rows.values()]
        text = _ENCODE([line.drawn, rows, line.ended])
        if text != before:
            dies = max([*(row.dies for row in line.rows.values()), *(until for until, _ in line.ended.values())])
            self.file.execute(_WRITE, name=name, boot=self._boot, dies=dies, line=text)

    def _draw_token(self, _: int) -> int:
        (last,) = self.file.execute("SELECT last FROM fencing_token").fetchone()
        token = self._next_token(last)
        self.file.execute("UPDATE fencing_token SET last = :token", token=token)
        self._drawn = True
        return token

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return names that may have tickets, in order, after *after*; some need not begin with *prefix*."""
        with self.file.snapshot():
            found = self.file.execute(_NAMES, boot=self._boot, prefix=prefix, after=after, limit=limit).fetchall()
        return [name for (name,) in found]

    def sweep(self) -> None:
        """Delete the lines whose tickets are dead."""
        with self.file.transaction() as now:
            self.file.execute(_SWEEP, boot=self._boot, now=now)

    def moved(self) -> bool:
        """Return whether the path no longer leads to this file."""
        return self.file.moved()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
