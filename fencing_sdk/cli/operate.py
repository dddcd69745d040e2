"""
``fencing ls``, ``show`` and ``break``: what is held, by whom, who waits, and a lock taken away.

    done                               0
    break: not broken                  1, the grant is over, or the question was answered by no
    bad usage                          2
    store unavailable                  69
    interrupted by Ctrl-C              130, and nothing was taken away
"""

from __future__ import annotations

import json
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fencing_sdk._client import LockClient
from fencing_sdk._client_operating import check_reason, check_token
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.holder_facts import read_facts
from fencing_sdk.cli._operator_views import as_fields, at_a_terminal, look, mode_of, readable, span
from fencing_sdk.cli._store import StoreOptions
from fencing_sdk.cli._streams import Output, say, write_out
from fencing_sdk.errors import ConfigurationError, UnsupportedError, shown

NOT_BROKEN = 1
_NUMBERS = ("TOKEN", "HELD", "LEFT", "WAIT")
_HEADINGS = ("NAME", "HOLDER", *_NUMBERS, "METADATA")
_ALIGNED = 60
"""Columns up to which a text in a pipe is filled up with spaces. A longer one moves its own line only."""
_GLANCE = 0.2
"""Seconds after which a question looks whether it was interrupted right before it began to wait."""


def list_locks(pattern: str, output: Output, *, where: StoreOptions, as_json: bool, limit: int) -> int:
    """
    Print what is held: a table of at most *limit* rows, or a line of JSON for each holder.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    if limit < 0:
        msg = "--limit must be 0, for all, or a number of rows"
        raise ConfigurationError(msg)

    async def lines(locks: LockClient) -> int:
        async for holder in locks.held(pattern):
            write_out(json.dumps(as_fields(holder)) + "\n")
        return 0

    async def table(locks: LockClient) -> int:
        rows: list[Holder] = []
        more = False
        async for holder in locks.held(pattern):
            if more := limit > 0 and len(rows) == limit:
                break
            rows.append(holder)
        if rows:
            _print_table(sorted(rows, key=lambda row: (row.name, row.permit or 0)), output)
        else:
            say("nothing is held" if pattern == "*" else f"nothing is held that matches {shown(pattern)}")
        if more:
            say(f"there is more than these {limit}; see all with --limit 0 or --json")
        return 0

    return look(where, lines if as_json else table)


def _print_table(rows: Sequence[Holder], output: Output) -> None:
    """Fit the table into a terminal. In a pipe each holder has one line, with the whole name: ``fencing ls | grep``."""
    cells = [_cells(row) for row in rows]
    if output.file.isatty():  # is_terminal is true in a pipe, too, where FORCE_COLOR is set
        output.print(_table(cells))
        return
    head, *lines = _lines([_HEADINGS, *cells])
    output.out(head, style="bold", highlight=False)
    output.out("\n".join(lines), highlight=False)


def _cells(row: Holder) -> Sequence[str]:
    name = readable(row.name) + ("" if row.mode.word == "lock" else f" ({mode_of(row)})")
    waiting = "-" if row.waiters is None else str(row.waiters)
    held, left, metadata = span(row.held_for), span(row.remaining), readable(read_facts(row).summary)
    return name, row.holder, str(row.token), held, left, waiting, metadata


def _table(rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("NAME", overflow="fold", ratio=3, min_width=12)
    table.add_column("HOLDER", no_wrap=True)
    for heading in _NUMBERS:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("METADATA", overflow="ellipsis", no_wrap=True, ratio=2, min_width=8)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as a line, with its columns below those of the others as far as no long text is in the way."""
    widths = [min(max(map(cell_len, column)), _ALIGNED) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(_HEADINGS, row, widths, strict=True)
        yield "  ".join(_filled(text, width, right=heading in _NUMBERS) for heading, text, width in columns).rstrip()


def _filled(text: str, width: int, *, right: bool) -> str:
    gap = " " * (width - cell_len(text))
    return gap + text if right else text + gap


def show_lock(name: str, output: Output, *, where: StoreOptions, as_json: bool) -> int:
    """
    Print who holds *name*, and the line.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    async def show(locks: LockClient) -> int:
        holders = await locks.holders(name)
        line = await _line(locks, name)
        if as_json:
            waiting = None if line is None else [as_fields(waiter) for waiter in line]
            held = [as_fields(holder) for holder in holders]
            write_out(json.dumps({"name": name, "holders": held, "waiting": waiting}) + "\n")
            return 0
        output.print(Text(readable(name), style="bold"))
        if not holders:
            output.print("  free")
        for holder in holders:
            output.print(_facts(holder))
        if line:
            output.print(_queue(line))
        return 0

    return look(where, show)


async def _line(locks: LockClient, name: str) -> Sequence[Waiting] | None:
    try:
        return await locks.waiters(name)
    except UnsupportedError:
        return None


def _facts(holder: Holder) -> Table:
    facts = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("held as", mode_of(holder))
    facts.add_row("holder", holder.holder)
    facts.add_row("token", str(holder.token))
    facts.add_row("held for", span(holder.held_for))
    said = read_facts(holder)
    facts.add_row("time left", span(holder.remaining) + ("" if said.kept_until else " without a renewal"))
    if said.state:
        facts.add_row("state", said.state)
    facts.add_row("metadata", Text(said.who or readable(said.text or "-")))
    return facts


def _queue(line: Sequence[Waiting]) -> Table:
    queue = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    queue.add_column(style="dim", no_wrap=True)
    queue.add_column(overflow="fold")
    for place, waiter in enumerate(line, start=1):
        about = f"{waiter.holder}  {mode_of(waiter)}  for {span(waiter.waiting_for)}"
        queue.add_row(f"waiter {place}", Text(f"{about}  {readable(read_facts(waiter).summary)}".rstrip()))
    return queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaking:
    """What ``fencing break`` was asked for."""

    name: str
    reason: str
    token: int | None
    yes: bool
    as_json: bool

    def run(self, output: Output, where: StoreOptions) -> int:
        """
        Take the lock away from the holder with the token, or from the only one, after a question at a terminal.

        Raises:
            ConfigurationError: an argument cannot work, or there is no terminal and no *yes*.
        """
        if not self.yes and (self.as_json or not at_a_terminal()):
            msg = "break asks before it takes a lock away, and here is no terminal; add --yes"
            raise ConfigurationError(msg)
        check_reason(self.reason)  # before the question
        if self.token is not None:
            check_token(self.token)
        return look(where, lambda locks: self._take_away(locks, output))

    async def _take_away(self, locks: LockClient, output: Output) -> int:
        victim = _victim(self.name, await locks.holders(self.name), self.token)
        if victim is None:
            token = "" if self.token is None else f" with token {self.token}"
            return self._told(None, f"{shown(self.name)} is not held{token}")
        if not self.yes and not _confirmed(output, victim, await _line(locks, self.name), self.reason):
            return self._told(victim, "nothing was done")
        if not await locks.revoke(self.name, token=victim.token, reason=self.reason):
            return self._told(victim, f"nothing was done: the grant with token {victim.token} is over")
        return self._told(victim)

    def _told(self, victim: Holder | None, problem: str = "") -> int:
        """Tell what became of it, and return the exit code."""
        if self.as_json:
            token = None if victim is None else victim.token
            fields = {"name": self.name, "token": token, "reason": self.reason, "broken": not problem}
            write_out(json.dumps(fields | {"problem": problem or None}) + "\n")
        elif problem:
            say(problem)
        elif victim is not None:
            say(f"{shown(self.name)} was taken away from {victim.holder} (token {victim.token})")
        return NOT_BROKEN if problem else 0


def _victim(name: str, holders: Sequence[Holder], token: int | None) -> Holder | None:
    tokens = sorted({holder.token for holder in holders})
    if token is None and len(tokens) > 1:
        listed = ", ".join(map(str, tokens))
        msg = f"{shown(name)} has several holders; choose one with --token: {listed}"
        raise ConfigurationError(msg)
    return next((holder for holder in holders if token in {None, holder.token}), None)


def _confirmed(output: Output, victim: Holder, line: Sequence[Waiting] | None, reason: str) -> bool:
    output.print(Text(readable(victim.name), style="bold"))
    output.print(_facts(victim))
    output.print()
    if not read_facts(victim).kept_until:
        output.print(Text(f"The holder's work is cancelled with: revoked: {reason}"))
    output.print("Guards refuse its token as soon as a later holder has written.")
    following = (
        "The lock is free then." if not line else f"The next holder is {line[0].holder}, of {len(line)} who wait."
    )
    output.print(following)
    try:
        with _interruptible():
            output.print(Text("Take it away? [y/N] "), end="")
            answer = _line_typed()
    except EOFError:
        return False
    except KeyboardInterrupt:
        say("nothing was done")
        raise
    return answer.strip().lower() in {"y", "yes"}


def _line_typed() -> str:
    """Wait for a line, and then read it: a signal that came right before a read would be heeded after the read."""
    while not select.select([sys.stdin], [], [], _GLANCE)[0]:
        pass
    return input()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the question at once: asyncio's own handler waits until the event loop has its turn again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
