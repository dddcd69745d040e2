"""
``fencing ls``, ``show``, ``break`` and ``init``: what is held, who waits, a lock taken away, a store made ready.

    done                               0
    break: not broken                  1, the grant is over, or the question was answered by no
    bad usage                          2
    store unavailable                  69
    interrupted by Ctrl-C              130, and nothing was taken away
"""
# ruff: noqa: PLC0415  (rich takes longer than the rest of the start, and draws for people alone)

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from fencing_sdk._arguments import check_reason
from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import UNKNOWN, Holder, Waiting
from fencing_sdk._values.reports import read_facts
from fencing_sdk._values.token import ENV_URL, check_token
from fencing_sdk.abc._powers import SupportsInit, SupportsSchema
from fencing_sdk.backends import from_url
from fencing_sdk.cli._options import StoreOptions
from fencing_sdk.cli._streams import Exit, console, say, write_out
from fencing_sdk.errors import BackendError, ConfigurationError, UnsupportedError, shown

if TYPE_CHECKING:
    from rich.table import Table

NOT_BROKEN = 1
_NUMBERS = ("TOKEN", "HELD", "LEFT", "WAIT")
"""Headings of columns that stand on the right."""
_HEADINGS = ("NAME", "HOLDER", *_NUMBERS, "LABEL")
_ALIGNED = 60
"""Columns up to which a text in a pipe is filled up with spaces. A longer one moves its own line only."""
_PATIENCE = 30.0
"""Seconds: a table that others read and write is not created at once."""
_GLANCE = 0.2
"""Seconds after which a question looks whether it was interrupted right before it began to wait."""


def _look(where: StoreOptions, work: Callable[[LockClient], Awaitable[int]]) -> int:
    store = where.found()
    return Exit.UNAVAILABLE if store is None else store.ask(work)


def list_locks(pattern: str, *, where: StoreOptions, as_json: bool, limit: int) -> int:
    """Print what is held: a table of at most *limit* rows, or a line of JSON for each holder."""
    if limit < 0:
        msg = "--limit must be 0, for all, or a number of rows"
        raise ConfigurationError(msg)

    async def lines(locks: LockClient) -> int:
        async for holder in locks.all_holders(pattern):
            write_out(json.dumps(as_fields(holder)) + "\n")
        return 0

    async def table(locks: LockClient) -> int:
        rows: list[Holder] = []
        more = False
        async for holder in locks.all_holders(pattern):
            if more := limit > 0 and len(rows) == limit:
                break
            rows.append(holder)
        if rows:
            _print_table(sorted(rows, key=lambda row: (row.name, row.permit or 0)))
        else:
            say("nothing is held" if pattern == "*" else f"no held lock matches {shown(pattern)}")
        if more:
            say(f"there are more than these {limit}; see all with --limit 0 or --json")
        return 0

    return _look(where, lines if as_json else table)


def _print_table(rows: Sequence[Holder]) -> None:
    """Fit the table into a terminal. In a pipe each holder has one line, with the whole name: ``fencing ls | grep``."""
    cells = [
        (
            readable(row.name) + ("" if row.mode.word == "lock" else f" ({_mode_of(row)})"),
            row.id,
            str(row.token),
            span(row.held_for),
            span(row.remaining),
            "-" if row.waiters is None else str(row.waiters),
            readable(read_facts(row).summary),
        )
        for row in rows
    ]
    if sys.stdout is not None and sys.stdout.isatty():
        console().print(_table_of(cells))
    else:
        write_out("".join(f"{line}\n" for line in _lines([_HEADINGS, *cells])))


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as a line, with its columns below those of the others as far as no long text is in the way."""
    from rich.cells import cell_len

    widths = [min(max(map(cell_len, column)), _ALIGNED) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = [text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)]
        for place, heading in enumerate(_HEADINGS):
            if heading in _NUMBERS:  # which have no wide characters
                columns[place] = row[place].rjust(widths[place])
        yield "  ".join(columns).rstrip()


def show_lock(name: str, *, where: StoreOptions, as_json: bool) -> int:
    """Print who holds *name*, and the line."""

    async def show(locks: LockClient) -> int:
        holders = await locks.holders(name)
        line = await _line(locks, name)
        if as_json:
            waiting = None if line is None else [as_fields(waiter) for waiter in line]
            held = [as_fields(holder) for holder in holders]
            write_out(json.dumps({"name": name, "holders": held, "waiting": waiting}) + "\n")
            return 0
        from rich.text import Text

        output = console()
        output.print(Text(readable(name), style="bold"))
        if not holders:
            output.print("  free")
        for holder in holders:
            output.print(_facts_of(holder))
        if line:
            output.print(_queue_of(line))
        return 0

    return _look(where, show)


async def _line(locks: LockClient, name: str) -> Sequence[Waiting] | None:
    try:
        return await locks.waiters(name)
    except UnsupportedError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaking:
    """The arguments of ``fencing break``."""

    name: str
    reason: str
    token: int | None
    yes: bool
    as_json: bool

    def run(self, where: StoreOptions) -> int:
        """Take the lock away from the holder with the token, or from the only one, after a question at a terminal."""
        if not self.yes and (self.as_json or not (os.isatty(0) and os.isatty(1))):
            msg = "break asks before it takes a lock away, and there is no terminal here; add --yes"
            raise ConfigurationError(msg)
        check_reason(self.reason)  # before the question
        if self.token is not None:
            check_token(self.token)
        return _look(where, self._take_away)

    async def _take_away(self, locks: LockClient) -> int:
        victim = _victim(self.name, await locks.holders(self.name), self.token)
        if victim is None:
            token = "" if self.token is None else f" with token {self.token}"
            return self._outcome(None, f"{shown(self.name)} is not held{token}")
        if not self.yes and not _confirmed(victim, await _line(locks, self.name), self.reason):
            return self._outcome(victim, "nothing was done")
        if not await locks.revoke(self.name, token=victim.token, reason=self.reason):
            return self._outcome(victim, f"nothing was done: the grant with token {victim.token} is over")
        return self._outcome(victim)

    def _outcome(self, victim: Holder | None, problem: str = "") -> int:
        """Print the outcome, and return the exit code."""
        if self.as_json:
            token = None if victim is None else victim.token
            fields = {"name": self.name, "token": token, "reason": self.reason, "broken": not problem}
            write_out(json.dumps(fields | {"problem": problem or None}) + "\n")
        elif problem:
            say(problem)
        elif victim is not None:
            say(f"{shown(self.name)} was taken away from {victim.id} (token {victim.token})")
        return NOT_BROKEN if problem else 0


def _victim(name: str, holders: Sequence[Holder], token: int | None) -> Holder | None:
    tokens = sorted({holder.token for holder in holders})
    if token is None and len(tokens) > 1:
        listed = ", ".join(map(str, tokens))
        msg = f"{shown(name)} has several holders; choose one with --token: {listed}"
        raise ConfigurationError(msg)
    return next((holder for holder in holders if token in {None, holder.token}), None)


def _confirmed(victim: Holder, line: Sequence[Waiting] | None, reason: str) -> bool:
    from rich.text import Text

    output = console()
    output.print(Text(readable(victim.name), style="bold"))
    output.print(_facts_of(victim))
    output.print()
    said = read_facts(victim)
    if not said.kept_until and not said.detached_until:
        ending = "taken over" if victim.id == UNKNOWN else f"revoked: {reason}"
        output.print(Text(f"The holder's work is cancelled with: {ending}"))
    output.print("Guards refuse its token as soon as a later holder has written.")
    following = "The lock is free then." if not line else f"The next holder is {line[0].id}, of {len(line)} who wait."
    output.print(following)
    try:
        with _interruptible():
            output.print(Text("Take it away? [y/N] "), end="")
            while not select.select([sys.stdin], [], [], _GLANCE)[0]:
                pass  # a signal that comes right before a read would be heeded after it
            answer = input()
    except EOFError:
        return False
    except KeyboardInterrupt:
        say("nothing was done")
        raise
    return answer.strip().lower() in {"y", "yes"}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the question at once: asyncio's own handler waits until the event loop has its turn again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def prepare(where: StoreOptions, *, sql: bool) -> int:
    """Create the tables of the store that is named, or print them as *sql*; return the exit code."""
    store = where.named()
    if store is None:
        msg = f"--url is missing, and {ENV_URL} is not set; write: fencing init --url postgresql://host/database"
        raise ConfigurationError(msg)
    backend = from_url(store.url)
    if isinstance(backend, SupportsInit):
        return _found(backend)
    if not isinstance(backend, SupportsSchema):
        say(f"nothing to do: {store.url.partition('://')[0]}:// needs no tables, or makes them by itself")
        return 0
    if sql:
        write_out(f"{backend.schema_sql()}\n")  # for a migration: fencing init --sql > 0042_locks.sql
        return 0

    async def create() -> None:
        async with aclosing(backend):
            with anyio.fail_after(_PATIENCE):
                await backend.create_schema()

    try:
        asyncio.run(create())
    except BackendError as error:
        say(f"nothing was created: {error}")
        return Exit.UNAVAILABLE
    except TimeoutError:
        say(f"nothing was created: no answer within {_PATIENCE:g} s")
        return Exit.UNAVAILABLE
    say("the store is ready")
    return 0


def _found(backend: SupportsInit) -> int:
    async def found() -> str:
        async with aclosing(backend):
            return await backend.init()

    try:
        say(asyncio.run(found()))
    except BackendError as error:
        say(f"nothing was founded: {error}")
        return Exit.UNAVAILABLE
    return 0


# Holders and waiters as text.


def readable(text: str) -> str:
    """*text* as it is, or escaped if it could move a terminal's cursor: names and labels come from others."""
    return text if text.isprintable() else shown(text)


def span(seconds: float | None) -> str:
    """Seconds as people say them: ``0.4s``, ``12s``, ``3m05s``, ``2h07m``, ``3d04h``; a dash for what is not known."""
    if seconds is None:
        return "-"
    if seconds < _ROUGH:
        return f"{max(seconds, 0.0):.1f}s"
    for name, unit, lesser, part in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}{int(seconds % unit // part):02d}{lesser}"
    return f"{int(seconds)}s"


_ROUGH = 10.0
"""Seconds from which on tenths do not matter."""
_UNITS = (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1))


def _mode_of(one: Holder | Waiting) -> str:
    """Mode in which it holds or wants the name: ``lock``, ``reader``, ``permit 3``."""
    permit = one.permit if isinstance(one, Holder) else None
    return one.mode.word if permit is None else f"{one.mode.word} {permit}"


def as_fields(one: Holder | Waiting) -> dict[str, object]:
    """The fields for JSON, with times in seconds."""
    if isinstance(one, Waiting):
        return {
            "holder": one.id,
            "mode": one.mode.word,
            "waiting_for": one.waiting_for,
            "label": one.label,
        }
    said = read_facts(one)
    return {
        "name": one.name,
        "token": one.token,
        "holder": one.id,
        "mode": one.mode.word,
        "permit": one.permit,
        "remaining": one.remaining,
        "held_for": one.held_for,
        "waiters": one.waiters,
        "label": one.label,
        "kept_until": said.kept_until,
        "detached_until": said.detached_until,
    }


def _table_of(rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("NAME", overflow="fold", ratio=3, min_width=12)
    table.add_column("HOLDER", no_wrap=True)
    for heading in _NUMBERS:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("LABEL", overflow="ellipsis", no_wrap=True, ratio=2, min_width=8)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _facts_of(holder: Holder) -> Table:
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("held as", _mode_of(holder))
    facts.add_row("holder", holder.id)
    facts.add_row("token", str(holder.token))
    facts.add_row("held for", span(holder.held_for))
    said = read_facts(holder)
    facts.add_row("time left", span(holder.remaining) + ("" if said.kept_until else " without a renewal"))
    if said.state:
        facts.add_row("state", said.state)
    facts.add_row("label", Text(said.who or readable(said.text or "-")))
    return facts


def _queue_of(line: Sequence[Waiting]) -> Table:
    from rich.table import Table
    from rich.text import Text

    queue = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    queue.add_column(style="dim", no_wrap=True)
    queue.add_column(overflow="fold")
    for place, waiter in enumerate(line, start=1):
        about = f"{waiter.id}  {_mode_of(waiter)}  for {span(waiter.waiting_for)}"
        queue.add_row(f"waiter {place}", Text(f"{about}  {readable(read_facts(waiter).summary)}".rstrip()))
    return queue
