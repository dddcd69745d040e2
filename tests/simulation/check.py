"""
Judge recordings: ``python -m tests.simulation.check FILE ...``, from a checkout.

The files are JSON lines of one machine and run, made with ``FENCING_RECORD=run.jsonl`` or by a campaign.
Exit codes: 0 nothing was broken, 1 a promise was, 3 too little was recorded to judge, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.simulation.history import Line
from tests.simulation.judge import HEADLINES, PROMISES, Report, Verdict, check

CODES = {Verdict.OK: 0, Verdict.VIOLATED: 1, Verdict.UNKNOWN: 3}
PLAIN = ("P1", "P4")
"""The promises that a recording of ``FENCING_RECORD`` alone puts to the test."""
_SHOWN = 20
"""Violations that are printed."""


def read_lines(raw_lines: Iterable[bytes | str], where: str) -> list[Line]:
    """
    Parse the lines of one recording.

    Raises:
        ValueError: a line is not an event.
    """
    lines: list[Line] = []
    for number, raw in enumerate(raw_lines, start=1):
        try:
            line = json.loads(raw)
            line["kind"], float(line["t"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            msg = f"line {number} of {where} is not an event: expected a JSON object with 't' in seconds and 'kind'"
            raise ValueError(msg) from error
        lines.append(line)
    return lines


def verdict_lines(report: Report, *, least: int, require: Sequence[str] = PROMISES) -> list[str]:
    """Return what was observed and what was broken, a line each."""
    seen, verdict = report.observed, report.verdict(least=least, require=require)
    counts = ("acquisitions", "hand-overs", "losses", "writes", "refusals")
    lines = [", ".join(f"{seen[name]} {name}" for name in counts)]
    lines += [f"  {p} {report.of(p):<9}{seen[p]:>8} checks  {HEADLINES[p]}" for p in PROMISES]
    lines += [f"  {violation}" for violation in report.violations[:_SHOWN]]
    if len(report.violations) > _SHOWN:
        lines.append(f"  and {len(report.violations) - _SHOWN} more")
    why = ""
    if verdict is Verdict.UNKNOWN and seen["acquisitions"] < least:
        why = f": fewer than {least} acquisitions"
    elif verdict is Verdict.UNKNOWN and not seen["hand-overs"]:
        why = ": no lock was ever handed on"
    elif verdict is Verdict.UNKNOWN:
        never = [promise for promise in require if report.of(promise) is Verdict.UNKNOWN]
        why = f": the recording has nothing about {', '.join(never)}"
    return [*lines, f"verdict: {verdict}{why}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the files named in *arguments*; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.check", description="Judge recordings.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines, of one machine and run")
    parser.add_argument("--least", type=int, default=25, help="the fewest acquisitions from which to judge")
    about = "a promise that the recording must have tested; may be repeated; default: P1 and P4"
    parser.add_argument("--require", action="append", choices=PROMISES, help=about)
    options = parser.parse_args(arguments)
    try:
        lines: list[Line] = []
        for path in options.files:
            with path.open("rb") as file:
                lines += read_lines(file, str(path))
        report = check(lines)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    require = options.require or PLAIN
    for line in verdict_lines(report, least=options.least, require=require):
        printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)  # names are not ours
        sys.stdout.write(f"{printable}\n")
    return CODES[report.verdict(least=options.least, require=require)]


if __name__ == "__main__":
    sys.exit(main())
