"""What is drawn on a console: on standard output, and as an SVG picture of a terminal for the documentation."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.reports import read_facts
from fencing_sdk.cli._operator_views import NUMBERS, mode_of, readable, span
from fencing_sdk.cli._streams import Watched
from fencing_sdk.errors import ConfigurationError, shown

COLUMNS = 100
_FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


class Output(Console):
    """A console on standard output. A closed pipe is an error of ours and not, as by default, exit code 1."""

    def __init__(self) -> None:
        super().__init__(file=None if sys.stdout is None else cast("IO[str]", Watched(sys.stdout)))


def draw_screen(path: Path, title: str, show: Callable[[Console], None]) -> None:
    """
    Write what *show* prints on 100 columns into the file *path*. The picture loads nothing from elsewhere.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    show(console)
    picture = _FROM_ELSEWHERE.sub("", console.export_svg(title=title, unique_id="screen"))
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as failure:
        msg = f"cannot write {shown(str(path))}: {failure.strerror}"
        raise ConfigurationError(msg) from failure


def table_of(rows: Iterable[Sequence[str]]) -> Table:
    """What is held, as wide as the terminal: the *rows* have a cell for each heading of ``fencing ls``."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("NAME", overflow="fold", ratio=3, min_width=12)
    table.add_column("HOLDER", no_wrap=True)
    for heading in NUMBERS:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("LABEL", overflow="ellipsis", no_wrap=True, ratio=2, min_width=8)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def facts_of(holder: Holder) -> Table:
    """Everything about one holder."""
    facts = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("held as", mode_of(holder))
    facts.add_row("holder", holder.id)
    facts.add_row("token", str(holder.token))
    facts.add_row("held for", span(holder.held_for))
    said = read_facts(holder)
    facts.add_row("time left", span(holder.remaining) + ("" if said.kept_until else " without a renewal"))
    if said.state:
        facts.add_row("state", said.state)
    facts.add_row("label", Text(said.who or readable(said.text or "-")))
    return facts


def queue_of(line: Sequence[Waiting]) -> Table:
    """Who waits, in the order of the line."""
    queue = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    queue.add_column(style="dim", no_wrap=True)
    queue.add_column(overflow="fold")
    for place, waiter in enumerate(line, start=1):
        about = f"{waiter.id}  {mode_of(waiter)}  for {span(waiter.waiting_for)}"
        queue.add_row(f"waiter {place}", Text(f"{about}  {readable(read_facts(waiter).summary)}".rstrip()))
    return queue
