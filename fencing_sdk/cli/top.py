"""
``fencing top``: what is held, on a terminal, again and again.

Each look lists the locks page by page, at most `_MOST` of them, and asks nothing else: one call to the store for each
page, as often as ``--every`` says. ``q`` or Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import textwrap
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fencing_sdk._client import LockClient
from fencing_sdk._client_operating import PAGE
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.reports import read_facts
from fencing_sdk.cli._operator_views import at_a_terminal, look, mode_of, readable, span
from fencing_sdk.cli._options import StoreOptions
from fencing_sdk.cli._screen import COLUMNS, draw_screen
from fencing_sdk.cli._streams import check_output
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError

_MOST = 1000
"""Holders that one look asks for at most."""
_BAR = 14
"""Columns of the bar that shows the time left."""
_WIDE = 64
"""Columns below which the names need the place of the bars."""
_OFTEN = 0.2
"""The least seconds between two looks."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What one look showed."""

    holders: list[Holder]
    more: bool
    calls: int
    took: float
    problem: str = ""


def watch(pattern: str, *, where: StoreOptions, every: float, svg: Path | None) -> int:
    """
    Show what matches *pattern*, every so many seconds, until ``q`` is pressed; or draw one look into the file *svg*.

    Raises:
        ConfigurationError: an argument cannot work, or this is not a terminal.
    """
    screen = Screen(pattern, every)
    if svg is not None:
        check_output(svg)
        return look(where, lambda locks: _draw(locks, screen, svg), head=screen.show_first)
    if not at_a_terminal():
        msg = "fencing top needs a terminal; use: fencing ls --json"
        raise ConfigurationError(msg)
    if not every >= _OFTEN:
        msg = f"--every must be at least {_OFTEN:g} s: each look asks the store"
        raise ConfigurationError(msg)
    try:
        return look(where, lambda locks: _watch(locks, screen), head=screen.show_first)
    except KeyboardInterrupt:  # as good as q
        return 0


async def _draw(locks: LockClient, screen: Screen, svg: Path) -> int:
    shown = screen.of(await glance(locks, screen.pattern), width=COLUMNS, height=24)
    draw_screen(svg, f"fencing top {readable(screen.pattern)}", lambda console: console.print(shown))
    return 0


async def _watch(locks: LockClient, screen: Screen) -> int:
    console, over = Console(), asyncio.Event()
    with _keys(over), Live(console=console, screen=True, auto_refresh=False) as live:
        while not over.is_set():
            live.update(screen.of(await _patiently(locks, screen.pattern), *console.size), refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(screen.every):
                    await over.wait()
    return 0


@contextlib.contextmanager
def _keys(over: asyncio.Event) -> Iterator[None]:
    """Set *over* when ``q`` is pressed. The terminal hands keys on at once, without showing them."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def read() -> None:
        if os.read(keyboard, 64) in {b"", b"q", b"Q", b"\x1b"}:
            over.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


async def _patiently(locks: LockClient, pattern: str) -> Glance:
    """Look once. A store that does not answer is shown, and asked again at the next look; one that refuses is not."""
    try:
        return await glance(locks, pattern)
    except BackendUnavailableError as error:
        return Glance([], more=False, calls=1, took=0.0, problem=str(error))


async def glance(locks: LockClient, pattern: str) -> Glance:
    """
    Look once.

    Raises:
        BackendError: the store did not answer, or refused.
        UnsupportedError: it cannot list.
    """
    clock, holders, more = BootClock(), list[Holder](), False
    began = clock.now()
    async for holder in locks.all_holders(pattern):
        if more := len(holders) == _MOST:
            break
        holders.append(holder)
    return Glance(holders, more, calls=len(holders) // PAGE + 1, took=clock.now() - began)


class Screen:
    """The content of the screen: the last look, and the changes that all looks so far have shown."""

    def __init__(self, pattern: str, every: float) -> None:
        self.pattern = pattern
        self.every = every
        self._first = ""
        self._looks = 0
        self._changes = 0  # how often a look found another token than the one before
        self._tokens: dict[tuple[str, int | None], int] = {}
        self._longest: dict[str, float] = {}  # the most time left that a look has shown: a full bar

    def show_first(self, text: str) -> None:
        """Begin each screen with *text*."""
        self._first = text

    def of(self, seen: Glance, width: int, height: int) -> Group:
        """Two lines of totals; then the locks that most wait for, and those with the least time left."""
        if not seen.problem:
            self._note(seen)
        rows = sorted(seen.holders, key=lambda holder: (-(holder.waiters or 0), holder.remaining))
        first = textwrap.wrap(self._first, width)
        room = max(height - 5 - len(first), 1)
        more = len(rows) - room
        end = Text(f"... and {more} more" if more > 0 else "", style="dim")
        top = Text("\n".join([*first, ""]), style="yellow", end="")
        return Group(top, self._totals(seen), Text(), self._table(rows[:room], width), end)

    def _note(self, seen: Glance) -> None:
        tokens = {(holder.name, holder.permit): holder.token for holder in seen.holders}
        self._looks += 1
        self._changes += sum(self._tokens.get(key, token) != token for key, token in tokens.items())
        self._tokens = tokens
        former, self._longest = self._longest, {}
        for holder in seen.holders:
            longest = max(former.get(holder.name, 0.0), self._longest.get(holder.name, 0.0), holder.remaining)
            self._longest[holder.name] = longest

    def _totals(self, seen: Glance) -> Text:
        waiting = sum({holder.name: holder.waiters or 0 for holder in seen.holders}.values())
        rate = self._changes / (max(self._looks - 1, 1) * self.every) * 60
        text = Text(no_wrap=not seen.problem, overflow="fold" if seen.problem else "ellipsis")
        text.append(f"{len(seen.holders)}{'+' if seen.more else ''} held", style="bold")
        text.append(f"   {waiting} waiting   {rate:.1f} seen to change hands a minute\n")
        if seen.problem:
            return text.append(f"no answer: {readable(seen.problem)}", style="bold red")
        text.append(f"store {seen.took * 1000:.1f} ms a look   {seen.calls / self.every:.1f} calls/s   ", style="dim")
        return text.append(f"{readable(self.pattern)}   every {self.every:g} s   q quits", style="dim")

    def _table(self, rows: list[Holder], width: int) -> Table:
        bars = width >= _WIDE
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        table.add_column("NAME", no_wrap=True, overflow="ellipsis", ratio=3)
        table.add_column("HOLDER", no_wrap=True, overflow="ellipsis", max_width=max(width // 3 - 5, 8))
        for heading in ("HELD", "WAIT", "LEFT"):
            table.add_column(heading, no_wrap=True, justify="right")
        if bars:
            table.add_column("", width=_BAR)
        for row in rows:
            said = read_facts(row)
            name = readable(row.name) + ("" if row.mode.word == "lock" else f" ({mode_of(row)})")
            who = Text("kept, nothing runs" if said.kept_until else said.who or readable(said.text) or row.id)
            waiting = "-" if row.waiters is None else str(row.waiters)
            longest = max(self._longest.get(row.name, 0.0), row.remaining, 0.001)
            bar = [ProgressBar(total=longest, completed=max(row.remaining, 0.0), width=_BAR)] if bars else []
            table.add_row(Text(name), who, span(row.held_for), waiting, span(row.remaining), *bar)
        return table
