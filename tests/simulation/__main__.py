"""
Histories of a simulated world, made from seeds: ``python -m tests.simulation``, from a checkout.

The real client runs in processes that freeze and crash, behind a network that loses, delays and
doubles messages, in front of a store that restarts and forgets. One seed is one history, byte for
byte. `tests.simulation.judge` judges it, and the command prints each seed that breaks a promise
with the smallest script that still breaks it.

    python -m tests.simulation --histories 10000

Exit codes: 0 nothing was broken, 1 a promise was, 3 too little was observed, 2 wrong usage,
130 interrupted before all histories were played, none of which broke a promise.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import signal
import sys
import time
from pathlib import Path

from fencing_sdk._values.observers import keep_off_console
from fencing_sdk.errors import ConfigurationError
from tests.simulation.campaign import LEAST, Campaign, Writer, run_campaign
from tests.simulation.check import CODES
from tests.simulation.control import Control
from tests.simulation.controls import all_controls
from tests.simulation.judge import HEADLINES, PROMISES, Report
from tests.simulation.play import History, play
from tests.simulation.script import Script, write_election_script, write_script, write_share_script
from tests.simulation.shrink import shrink

_INTERRUPTED = 128 + signal.SIGINT
_MODULE = "tests.simulation"
_SHOWN = 3
"""Failing seeds that are made small and printed; the others are named."""
_EVERY = 10.0
"""Seconds between two lines of progress."""


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        msg = f"must be at least 1, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description="Try to break the promises.")
    parser.add_argument("--histories", type=_positive, default=1000, metavar="N", help="how many seeds to play")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="the first of them")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="J", help="how many processes")
    parser.add_argument("--seed", type=int, metavar="S", help="play one seed and print what it broke")
    parser.add_argument("--script", metavar="JSON", help="play a script as printed for a failing seed, or @file")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the one history as JSON lines")
    parser.add_argument(
        "--controls",
        action="store_true",
        help="break parts on purpose, each of which has to be found",
    )
    parser.add_argument("--shares", action="store_true", help="permits, readers and writers in the place of locks")
    parser.add_argument("--elections", action="store_true", help="terms in the place of locks, and clients that drain")
    parser.add_argument("--digest", action="store_true", help="print a digest of the histories, to compare machines")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Do what *arguments* ask for; return the exit code."""
    options = _parse(arguments)
    write = write_share_script if options.shares else write_election_script if options.elections else write_script
    try:
        if options.controls:
            return _controls()
        if options.script is not None:
            return _one(_read(options.script), options.record)
        if options.seed is not None:
            return _one(write(options.seed), options.record)
    except (ConfigurationError, OSError) as error:
        _say(str(error))
        return 2
    if options.digest:
        return _digest(range(options.first_seed, options.first_seed + options.histories), write)
    return _many(options.first_seed, options.histories, options.jobs, write)


def _read(text: str) -> Script:
    return Script.from_json(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)


def _digest(seeds: range, write: Writer) -> int:
    whole = hashlib.sha256()
    for seed in seeds:
        whole.update(play(write(seed)).text.encode())
    _say(whole.hexdigest())
    return 0


def _one(script: Script, record: Path | None) -> int:
    """Play one script, once as it is and once as small as it gets."""
    history = play(script)
    if record is not None:
        record.write_text(history.text, encoding="utf-8")
        _say(f"recorded in {record}")
    if not history.report.violations:
        _say(f"seed {script.seed}: nothing was broken in {len(history.lines)} lines")
        return 0
    _explain(history)
    return 1


def _explain(history: History) -> None:
    script = history.script
    _say(f"\nseed {script.seed} ({script.theme}) broke {', '.join(sorted(history.report.rules))}:")
    for violation in history.report.violations[:_SHOWN]:
        _say(f"  {violation}")
    small = shrink(script, history.report.rules)
    _say(f"  the smallest script that still does ({len(small.visits)} visits, {len(small.faults)} faults):")
    for visit in small.visits:
        _say(f"    {visit.at:9.6f} c{visit.client} {visit.body} under {visit.name!r} for {visit.lasts:.3f} s: {visit}")
    for fault in small.faults:
        _say(f"    {fault.at:9.6f} {fault.kind}: {fault}")
    modes = {visit.mode for visit in script.visits}
    drains = any(fault.kind == "drain" for fault in script.faults)
    shares = " --elections" if drains else " --shares" if modes != {"lock"} else ""
    _say(f"  repeat it:\n    python -m {_MODULE} --seed {script.seed}{shares} --record seed-{script.seed}.jsonl")
    _say(f"    python -m {_MODULE} --record small.jsonl --script '{small.to_json()}'")


def _many(first: int, histories: int, jobs: int, write: Writer) -> int:
    heard, failed = -math.inf, 0

    def progress(campaign: Campaign) -> None:
        nonlocal heard, failed
        for seed in list(campaign.failed)[failed:]:
            failed += 1
            _say(f"seed {seed} broke {', '.join(campaign.failed[seed])}")
        if time.monotonic() - heard >= _EVERY:
            heard = time.monotonic()
            _say(f"{campaign.histories:>9} histories, {campaign.rate:.0f}/s, {len(campaign.failed)} seeds failed")

    campaign = run_campaign(first, histories, jobs, progress, write)
    if campaign.interrupted:
        _say(f"interrupted: {campaign.histories} of {histories} histories were played")
    _say(summary(campaign))
    for seed in sorted(campaign.failed)[:_SHOWN]:
        _explain(play(write(seed)))
    if len(campaign.failed) > _SHOWN:
        _say(f"\nfailed besides: {', '.join(map(str, sorted(campaign.failed)[_SHOWN:]))}")
    return _INTERRUPTED if campaign.interrupted and not campaign.failed else CODES[campaign.verdict]


def summary(campaign: Campaign) -> str:
    """What a campaign observed, in lines."""
    seen, rate = campaign.report.observed, f"{campaign.rate:.0f}"
    what = ("acquisitions", "hand-overs", "losses", "writes", "refusals", "troubles")
    lines = [f"{campaign.histories} histories in {campaign.seconds:.1f} s ({rate} histories per second)"]
    lines.append(", ".join(f"{seen[name]} {name}" for name in what))
    lines += [_line(campaign.report, promise) for promise in PROMISES]
    lines.append(f"verdict: {campaign.verdict} (a pass needs {LEAST} acquisitions, and every promise put to the test)")
    return "\n".join(lines)


def _line(report: Report, promise: str) -> str:
    return f"  {promise} {report.of(promise):<9} {report.observed[promise]:>9} checks  {HEADLINES[promise]}"


def _controls() -> int:
    controls = all_controls()
    missed = [control for control in controls if not _caught(control)]
    _say(f"{len(controls) - len(missed)} of {len(controls)} broken variants were caught")
    return 1 if missed else 0


def _caught(control: Control) -> bool:
    for number, script in enumerate(control.scripts(), start=1):
        with control.broken():
            report = play(script).report
        if found := report.rules & control.rules:
            _say(f"{control.promise} {control.name}: caught by seed {number} of {control.within} ({min(found)})")
            return True
    _say(f"{control.promise} {control.name}: MISSED by {control.within} seeds")
    return False


if __name__ == "__main__":
    keep_off_console()
    sys.exit(main(sys.argv[1:]))
