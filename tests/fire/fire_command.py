"""``python -m tests.fire``: rounds on real servers for as long as one likes, and what they came to."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fire_run import KINDS, Outcome, play
from fire_stores import STORES

from tests.simulation.check import verdict_lines
from tests.simulation.judge import PROMISES, Verdict

OK, VIOLATED, UNKNOWN = 0, 1, 3
ROUND = 90.0
"""Seconds of faults in one round."""


def too_little(outcome: Outcome, *, least: int) -> list[str]:
    """Why *outcome* is not a pass although nothing was broken."""
    report = outcome.report
    reasons = []
    if len(outcome.faults) < KINDS:
        reasons.append(f"{len(outcome.faults)} kinds of fault, and not {KINDS}")
    if report.observed["acquisitions"] < least:
        reasons.append(f"{report.observed['acquisitions']} acquisitions, and not {least}")
    if not report.observed["refusals"]:
        reasons.append("no stale write was refused")
    reasons += [f"nothing was seen of {p}" for p in PROMISES if report.of(p) is Verdict.UNKNOWN]
    return reasons


def code(outcome: Outcome, *, least: int) -> int:
    if outcome.failures or outcome.report.violations:
        return VIOLATED
    passed = outcome.report.verdict(least=least) is Verdict.OK and not too_little(outcome, least=least)
    return OK if passed else UNKNOWN


def heard(outcome: Outcome, *, least: int) -> list[str]:
    """The figures, and the checker's table."""
    report, lines = outcome.report, outcome.lines
    faults = ", ".join(f"{kind} {number}" for kind, number in sorted(outcome.faults.items()))
    missed = ", ".join(f"{kind} {number}" for kind, number in sorted(outcome.missed.items()))
    work = f"{lines['renewed']} renewals, {lines['read']} tokens read, {lines['not_acquired']} without a lease"
    written = f"{lines['write_accepted']} writes accepted, {lines['write_refused']} refused"
    counts = (
        f"{outcome.seconds:.0f} s, {outcome.faults.total()} faults of {len(outcome.faults)} kinds: {faults}",
        *([f"tried, and hit nobody: {missed}"] if missed else []),
        f"{work}, {written}",
    )
    failed = [f"  failure: {failure}" for failure in outcome.failures]
    short = [f"  too little: {reason}" for reason in too_little(outcome, least=least)]
    return [*counts, *verdict_lines(report, least=least), *failed, *short]


async def burn(
    backend: str, folder: Path, *, seed: int, seconds: float, workers: int, least: int, shares: bool = False
) -> Outcome:
    """Play rounds on one backend, on servers that live through all of them, until *seconds* of faults are over."""
    total = Outcome()
    servers = folder / "servers"
    servers.mkdir(parents=True)
    chance = random.Random(seed)
    store = STORES[backend](servers, chance)
    try:
        await asyncio.to_thread(store.start)
        rounds = max(1, round(seconds / ROUND))
        for number in range(1, rounds + 1):
            length = seconds / rounds
            settings = {
                "seed": chance.randrange(2**32),
                "seconds": length,
                "workers": workers,
                "least": least // rounds,
                "shares": shares,
            }
            outcome = await play(store, folder / f"round-{number}", **settings)
            total.add(outcome)
            broken = len(outcome.report.violations) + len(outcome.failures)
            say(f"  round {number}: {outcome.report.observed['acquisitions']} acquisitions, {broken} violations")
    except BaseException:
        (folder / "servers.log").write_text(store.log())
        raise
    finally:
        await asyncio.to_thread(store.close)
    return total


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fire", description=__doc__)
    parser.add_argument("--backend", choices=[*STORES, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults, for each backend")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the faults and their moments; it does not repeat real processes"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder for the recordings; without it they are kept if there is no pass",
    )
    parser.add_argument("--shares", action="store_true", help="permits, readers and writers in the place of locks")
    told_to = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if told_to.seed is None else told_to.seed
    out: Path = told_to.out or Path(tempfile.mkdtemp(prefix="fire-"))
    worst = OK
    for backend in STORES if told_to.backend == "all" else [told_to.backend]:
        say(f"{backend}: seed {seed}, {told_to.workers} workers, {told_to.minutes:g} minutes")
        seconds = told_to.minutes * 60
        least = max(25, int(told_to.minutes * 60))
        settings = {
            "seed": seed,
            "seconds": seconds,
            "workers": told_to.workers,
            "least": least,
            "shares": told_to.shares,
        }
        outcome = asyncio.run(burn(backend, out / backend, **settings))
        for line in heard(outcome, least=least):
            say(line)
        worst = _worse(worst, code(outcome, least=least))
    if worst == OK and told_to.out is None:
        shutil.rmtree(out, ignore_errors=True)
    else:
        say(f"recordings: {out}")
    return worst


def _worse(one: int, other: int) -> int:
    return next((code for code in (VIOLATED, UNKNOWN) if code in (one, other)), OK)
