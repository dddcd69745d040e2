"""``fencing check``: a recording, judged."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from pathlib import Path

from rich.console import Console

from fencing_sdk.cli._recording_lines import read_recording
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.testing.history import HEADLINES, PROMISES, Report, Verdict, check

PLAIN = ("P1", "P4")
"""What a recording shows that was made with ``FENCING_RECORD`` and nothing else."""
_SHOWN = 20
"""Violations that are printed."""


@unique
class Code(IntEnum):
    """Exit codes. 2 is wrong usage, as everywhere."""

    OK = 0
    VIOLATED = 1
    UNKNOWN = 3


def check_recordings(recordings: Sequence[Path], console: Console, *, least: int, require: Sequence[str]) -> Code:
    """
    Judge *recordings* of one run, and print what was observed and what was broken.

    Args:
        recordings: Files of JSON lines, made on one machine.

        console: Where to print.

        least: Acquisitions below which they show nothing.

        require: Promises without which there is no pass.

    Raises:
        ConfigurationError: a file cannot be read, a line is not an event, or an argument cannot work.
    """
    if least < 1:
        msg = f"--least must be at least 1, got {least}"
        raise ConfigurationError(msg)
    if unknown := [promise for promise in require if promise not in PROMISES]:
        msg = f"--require takes promises from P1 to P8, not {shown(unknown[0])}"
        raise ConfigurationError(msg)
    report = check(read_recording(recordings))
    verdict = report.verdict(least=least, require=tuple(require))
    for line in _told(report, verdict, least, require):
        console.print(_harmless(line), markup=False, highlight=False, soft_wrap=True)
    return Code[verdict.name]


def _told(report: Report, verdict: Verdict, least: int, require: Sequence[str]) -> list[str]:
    seen = report.observed
    counts = ("acquisitions", "hand-overs", "losses", "writes", "refusals")
    lines = [", ".join(f"{seen[name]} {name}" for name in counts)]
    lines += [f"  {p} {report.of(p):<9}{seen[p]:>8} checks  {HEADLINES[p]}" for p in PROMISES]
    lines += [f"  {violation}" for violation in report.violations[:_SHOWN]]
    if len(report.violations) > _SHOWN:
        lines.append(f"  and {len(report.violations) - _SHOWN} more")
    return [*lines, f"verdict: {verdict}{_missing(report, verdict, least, require)}"]


def _missing(report: Report, verdict: Verdict, least: int, require: Sequence[str]) -> str:
    """Why a recording shows too little."""
    if verdict is not Verdict.UNKNOWN:
        return ""
    if report.observed["acquisitions"] < least:
        return f": fewer than {least} acquisitions"
    if not report.observed["hand-overs"]:
        return ": no lock was ever handed on"
    never = [promise for promise in require if report.of(promise) is Verdict.UNKNOWN]
    return f": nothing was recorded about {', '.join(never)}"


def _harmless(text: str) -> str:
    """Escape what names in a recording could do to a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
