"""``fencing doctor``: a diagnosis of this machine and of its store, as a table or as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterable
from contextlib import AsyncExitStack, aclosing
from enum import IntEnum, unique
from pathlib import Path

import anyio
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fencing_sdk import connect
from fencing_sdk._values.token import ENV_URL
from fencing_sdk.abc import Backend
from fencing_sdk.backends import from_url
from fencing_sdk.cli._options import StoreOptions
from fencing_sdk.cli._streams import check_output, console, harmless, say, write_out, write_picture
from fencing_sdk.diagnosis import Diagnosis, Finding, Measurements, Severity
from fencing_sdk.errors import ConfigurationError

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_CLOSE_LIMIT = 5.0
_FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)
"""Fonts that a picture would load from the web."""


@unique
class Health(IntEnum):
    """Exit codes. 2 is wrong usage, as everywhere."""

    SOUND = 0
    ERRORS = 1
    WARNINGS = 3


def run_doctor(where: StoreOptions, *, over: float, ttl: float, as_json: bool, svg: Path | None) -> Health:
    """
    Diagnose the store that is named or the default one, print what was found, and return the exit code.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    try:
        store = where.store()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        msg = f"no folder for the locks ({error}); give --url, or set {ENV_URL} or XDG_STATE_HOME"
        raise ConfigurationError(msg) from error
    if svg is not None:
        check_output(svg)
    if store.warning:
        say(store.warning)
    scheme = store.url.partition("://")[0]

    async def diagnose() -> Diagnosis:
        async with AsyncExitStack() as stack:
            # Two connections; a store in memory has but one.
            backends = [from_url(store.url) for _ in range(1 if scheme == "memory" else 2)]
            for backend in backends:
                stack.push_async_callback(_close, backend)
            clients = [connect(backend) for backend in backends]
            return await clients[0].diagnose(over=over, ttl=ttl, other=clients[-1] if clients[1:] else None)

    diagnosis = asyncio.run(diagnose())
    if as_json:
        write_out(json.dumps(diagnosis.as_dict(), indent=2) + "\n")
    else:
        _print(console(), diagnosis, scheme)
    if svg is not None:
        recorded = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        _print(recorded, diagnosis, scheme)
        picture = recorded.export_svg(title="fencing doctor", unique_id="screen")
        write_picture(svg, _FROM_ELSEWHERE.sub("", picture))
    if diagnosis.worst is Severity.ERROR:
        return Health.ERRORS
    return Health.WARNINGS if diagnosis.worst is Severity.WARNING else Health.SOUND


async def _close(backend: Backend) -> None:
    with anyio.move_on_after(_CLOSE_LIMIT):
        async with aclosing(backend):
            pass


def _print(to: Console, diagnosis: Diagnosis, scheme: str) -> None:
    measured = diagnosis.measurements
    _head(to, f"Measured for {measured.seconds:.1f} s, on {scheme}://")
    _rows(to, _measured(measured))
    _head(to, "Found")
    for finding in diagnosis.findings:
        _show(to, finding)
    counts = [
        f"{number} {severity}{'' if number == 1 else 's'}"
        for severity in sorted(Severity, reverse=True)
        if (number := sum(finding.severity is severity for finding in diagnosis.findings))
    ]
    to.print(f"  {', '.join(counts) or 'nothing: every check passed'}\n", markup=False, highlight=False)
    _head(to, "Advice for each lock")
    advice = diagnosis.advice
    numbers = {
        "ttl": advice.ttl,
        "safety_buffer": advice.safety_buffer,
        "heartbeat_interval": advice.heartbeat_interval,
    }
    shown = zip(numbers.items(), advice.arithmetic, strict=True)
    _rows(to, [(name, f"{number:g} s", how) for (name, number), how in shown])


def _head(to: Console, text: str) -> None:
    to.print(Text(text, style="bold"))


def _rows(to: Console, rows: Iterable[tuple[str, str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=18, no_wrap=True)
    table.add_column(min_width=9, no_wrap=True, justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*(Text(harmless(cell, but="\n")) for cell in row))
    to.print(Padding(table, (0, 0, 1, 2), expand=False))


def _measured(measured: Measurements) -> list[tuple[str, str, str]]:
    times = {"p50": measured.renewal_p50, "p99": measured.renewal_p99, "slowest": measured.renewal_max}
    latencies = ", ".join(f"{name} {_seconds(time)}" for name, time in times.items() if time is not None)
    drift = None if measured.clock_drift is None else f"{round(100 * measured.clock_drift, 3) + 0.0:+.3f} %"
    rows = [
        ("event loop", _seconds(measured.loop_pause), "longest pause"),
        ("process", _seconds(measured.process_pause), "longest pause"),
        ("clock source", measured.clock_source, ""),
        ("renewals", str(measured.renewals), latencies),
        ("store's clock", _seconds(measured.clock_difference), "ahead of this machine's"),
        ("its drift", drift, "faster than this machine's, give or take the network"),
        ("tokens", str(len(measured.tokens)), "\n".join(map(str, measured.tokens))),
        ("handed on after", _seconds(measured.handed_on), "from one connection to the other"),
        ("loss noticed after", _seconds(measured.loss_noticed), "when another connection took the lock away"),
    ]
    return [(name, value, meaning) for name, value, meaning in rows if value is not None]


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{round(1000 * seconds, 1) + 0.0:.1f} ms"  # no -0.0


def _show(to: Console, finding: Finding) -> None:
    """One finding: its severity and name, and below them what, why, and what fixes it."""
    to.print(Text.assemble((f"  {finding.severity!s:<8}", _COLOURS[finding.severity]), (finding.check, "bold")))
    for text, style in ((finding.what, ""), (finding.reason, "dim"), (f"> {finding.fix}", "green")):
        to.print(Padding(Text(harmless(text, but="\n"), style=style), (0, 0, 0, 10)))
    to.print()
