"""``fencing doctor``: a diagnosis of this machine and of its store, as text or as JSON."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, aclosing
from enum import IntEnum, unique

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
from fencing_sdk.cli._streams import console, harmless, say, write_out
from fencing_sdk.diagnosis import Diagnosis, Severity
from fencing_sdk.errors import ConfigurationError

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow"}
_CLOSE_LIMIT = 5.0


@unique
class Health(IntEnum):
    """Exit codes. 2 is wrong usage, as everywhere."""

    SOUND = 0
    ERRORS = 1
    WARNINGS = 3


def run_doctor(where: StoreOptions, *, over: float, ttl: float, as_json: bool) -> Health:
    """Diagnose the store that is named or the default one, print what was found, and return the exit code."""
    try:
        store = where.store()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        msg = f"no folder for the locks ({error}); give --url, or set {ENV_URL} or XDG_STATE_HOME"
        raise ConfigurationError(msg) from error
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
    if diagnosis.worst is None:
        return Health.SOUND
    return Health.ERRORS if diagnosis.worst is Severity.ERROR else Health.WARNINGS


async def _close(backend: Backend) -> None:
    with anyio.move_on_after(_CLOSE_LIMIT):
        async with aclosing(backend):
            pass


def _print(to: Console, diagnosis: Diagnosis, scheme: str) -> None:
    to.print(Text(f"Found on {scheme}://", style="bold"))
    for finding in diagnosis.findings:
        to.print(Text.assemble((f"  {finding.severity!s:<8}", _COLOURS[finding.severity]), (finding.check, "bold")))
        for text, style in ((finding.what, ""), (finding.reason, "dim"), (f"> {finding.fix}", "green")):
            to.print(Padding(Text(harmless(text, but="\n"), style=style), (0, 0, 0, 10)))
        to.print()
    counts = [
        f"{number} {severity}{'' if number == 1 else 's'}"
        for severity in sorted(Severity, reverse=True)
        if (number := sum(finding.severity is severity for finding in diagnosis.findings))
    ]
    to.print(f"  {', '.join(counts) or 'nothing: every check passed'}\n", markup=False, highlight=False)
    to.print(Text("Advice for each lock", style="bold"))
    advice = diagnosis.advice
    slowest = advice.slowest_renewal
    renewals = "no renewal was measured" if slowest is None else f"20 x the slowest renewal ({_seconds(slowest)})"
    table = Table.grid(padding=(0, 2))
    for row in (
        ("ttl", f"{advice.ttl:g} s", "the largest of 15 s, the default,"),
        ("", "", f"15 x the longest pause ({_seconds(advice.longest_pause)}),"),
        ("", "", f"and {renewals}"),
        ("safety_buffer", f"{advice.safety_buffer:g} s", "ttl / 5"),
        ("heartbeat_interval", f"{advice.heartbeat_interval:g} s", "(ttl - safety_buffer) / 4"),
    ):
        table.add_row(*row)
    to.print(Padding(table, (0, 0, 1, 2), expand=False))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
