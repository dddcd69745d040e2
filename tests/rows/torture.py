"""
Leased rows under kills, freezes, slow transactions and crashes of the server, judged by what was committed.

``uv run python tests/rows/torture.py postgresql --rows 5000 --crashes``. Processes of eight tasks each claim rows of
one table. The work of each row writes an effect in the transaction that finishes the row, so the database itself says
whether a row's work counted twice, or whether a claim that was not the last one was committed. ``--mode plain`` cancels
no work and turns the local check off, so that the compare alone protects. The other modes are controls: what
applications write by hand, which this has to catch.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = (HERE, HERE.parent / "servers", HERE.parent / "support", HERE.parent.parent)
sys.path[:0] = [path for path in map(str, PATHS) if path not in sys.path]

from child_processes import end, spawn  # noqa: E402
from mysql_server import MysqlServer  # noqa: E402
from postgresql_server import FORGETFUL, PostgresqlServer  # noqa: E402
from row_benches import MysqlRowBench, PostgresqlRowBench, RowBench, SqliteRowBench, with_jobs  # noqa: E402
from torture_worker import (  # noqa: E402
    CANCELLED,
    COUNTER,
    FREE,
    NO_COMPARE,
    PLAIN,
    POLL,
    REVIVES,
    TTL,
    dialect_at,
)

CONTROLS = (NO_COMPARE, COUNTER, REVIVES)
FREEZE = 2 * TTL
STEP = 0.2
"""Seconds between two looks at the rows."""
CRASHING: dict[str, dict[str, Any]] = {
    "postgresql": {**FORGETFUL, "wal_writer_delay": "2s"},
    "mariadb": {"innodb_flush_log_at_trx_commit": 0, "innodb_flush_log_at_timeout": 2},
    "mysql": {"innodb_flush_log_at_trx_commit": 0, "innodb_flush_log_at_timeout": 2},
}
"""Settings under which a crash forgets the commits of up to two seconds, those of the application too."""
AGES = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0 - leased_until",
    "postgresql": "extract(epoch FROM clock_timestamp() - leased_until)::float8",
    "mysql": "timestampdiff(MICROSECOND, leased_until, utc_timestamp(6)) / 1e6",
}


@dataclass
class Report:
    """Verdict of one run."""

    rows: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    without_effect: int = 0
    again: int = 0
    """Rows that were claimed more than once."""
    twice: int = 0
    """Rows whose work counted more than once."""
    zombies: int = 0
    """Effects of a claim that was not the last one of its row."""
    unclaimed: float = 0.0
    """Seconds for which a row whose lease had run out was not claimed, at most."""
    opened: float = 0.0
    """Seconds for which a transaction of the application was open, at most."""
    outage: float = 0.0
    """Seconds for which the server was away, at most."""

    @property
    def safe(self) -> bool:
        return not (self.twice or self.zombies)

    @property
    def bound(self) -> float:
        return TTL + POLL + self.opened + self.outage + STEP

    @property
    def complete(self) -> bool:
        return not (self.unfinished or self.without_effect)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.rows} rows in {self.seconds:.0f} s ({self.rows / max(self.seconds, 0.1):.0f}/s), {faults}; "
            f"claimed again {self.again}, effects twice {self.twice}, zombie commits {self.zombies}, "
            f"unfinished {self.unfinished}, done without effect {self.without_effect}; "
            f"unclaimed for at most {self.unclaimed:.1f} s, bound {self.bound:.1f} s "
            f"(longest transaction {self.opened:.1f} s, outage {self.outage:.1f} s)"
        )


@contextlib.contextmanager
def database(kind: str, folder: Path, *, crashes: bool) -> Iterator[RowBench]:
    """Start a server for this run alone, with the tables of jobs and effects."""
    settings = CRASHING.get(kind, {}) if crashes else {}
    with contextlib.ExitStack() as stack:
        bench: RowBench
        if kind == "sqlite":
            bench = SqliteRowBench(folder / "app.db")
            bench.ask("PRAGMA journal_mode = WAL")
        elif kind == "postgresql":
            bench = PostgresqlRowBench(stack.enter_context(PostgresqlServer(**settings)))
        else:
            (folder / kind).mkdir()
            bench = MysqlRowBench(stack.enter_context(MysqlServer(kind, folder=folder / kind, **settings)))
        with_jobs(bench, kind)
        bench.ask("ALTER TABLE jobs ADD COLUMN claim VARCHAR(40)")
        bench.ask("CREATE TABLE effects (job BIGINT NOT NULL, claim VARCHAR(40) NOT NULL, process BIGINT NOT NULL)")
        partial = "" if kind in {"mariadb", "mysql"} else " WHERE state = 'queued'"
        bench.ask(f"CREATE INDEX jobs_next ON jobs ({'' if partial else 'state, '}priority, id){partial}")
        yield bench


class Torture:
    """
    One run.

    Args:
        bench: An empty table of jobs, from `database`.

        folder: For the logs of the workers.

        mode: How the workers work.

        slow: The part of rows whose work, or whose transaction before or after the finish, is longer than the ttl.

        crashes: Whether the server is killed, too.
    """

    def __init__(
        self,
        bench: RowBench,
        folder: Path,
        *,
        mode: str = CANCELLED,
        processes: int = 4,
        slow: float = 0.0015,
        crashes: bool = False,
        seed: int = 7,
    ) -> None:
        self.bench = bench
        self.folder = folder
        self.mode = mode
        self.slow = slow
        self.crashes = crashes
        self.chance = random.Random(seed)
        self._number = processes
        self._processes: list[Popen[bytes]] = []
        self._ended: dict[Path, float] = {}
        """When the processes that were killed ended, by their logs."""
        self._logs: dict[int, Path] = {}
        self._frozen: dict[int, float] = {}
        """Until when processes stand still, by their ids."""
        self._waiting: dict[tuple[int, int], float] = {}
        """Since when rows wait although their leases have run out, by their keys and tokens."""
        self._looked = 0.0

    def run(self, rows: int, seconds: float, *, until_caught: bool = False) -> Report:
        """Work on so many *rows*, for at most so many *seconds*, or until a fault of a control is seen."""
        report = Report(rows)
        for first in range(0, rows, 1000):
            some = range(first, min(rows, first + 1000))
            self.bench.ask(f"INSERT INTO jobs (priority) VALUES {', '.join(f'({number % 3})' for number in some)}")
        began = self._looked = time.monotonic()
        try:
            self._processes = [self._start() for _ in range(self._number)]
            self._harm(report, began + seconds, until_caught=until_caught)
            self._let_end()
        finally:
            for process in self._processes:
                end(process, politely=False)
        report.seconds = time.monotonic() - began
        report.opened = max((self._longest(log) for log in self._logs.values()), default=0.0)
        self._judge(report)
        return report

    def _start(self) -> Popen[bytes]:
        log = self.folder / f"worker-{len(self._logs)}.transactions"
        arguments = [self.bench.url, self.mode, str(self.chance.randrange(2**32)), str(self.slow), str(log)]
        command = [sys.executable, str(HERE / "torture_worker.py"), *arguments]
        process = spawn(command, folder=self.folder, log=log.with_suffix(".log"))
        self._logs[process.pid] = log
        return process

    def _harm(self, report: Report, until: float, *, until_caught: bool) -> None:
        next_harm = time.monotonic() + 2.0
        next_crash = time.monotonic() + 4.0
        while time.monotonic() < until:
            time.sleep(STEP)
            now = time.monotonic()
            self._resume(now)
            left = self._look(report)
            if until_caught:
                self._judge(report)
            if not left or (until_caught and not report.safe):
                return
            early = not report.faults["crashes"] and left < report.rows * 3 // 4  # a short run ends before the moment
            if self.crashes and (early or now >= next_crash):
                report.faults["crashes"] += 1
                self._crash(report)
                next_crash = time.monotonic() + self.chance.uniform(3.0, 8.0)
            if now >= next_harm and left > min(200, report.rows // 5) and len(self._at_work()) > self._number // 2:
                next_harm = now + self.chance.uniform(0.8, 1.8)
                report.faults[self._harm_one()] += 1

    def _harm_one(self) -> str:
        place, process = self.chance.choice(self._at_work())
        if self.chance.random() < 0.5:
            end(process, politely=False)
            self._ended[self._logs[process.pid]] = time.monotonic()
            self._processes[place] = self._start()
            return "kills"
        process.send_signal(signal.SIGSTOP)
        self._frozen[process.pid] = time.monotonic() + FREEZE
        return "freezes"

    def _at_work(self) -> list[tuple[int, Popen[bytes]]]:
        """Return the processes that have begun to work and do not stand still, by their places."""
        return [
            (place, process)
            for place, process in enumerate(self._processes)
            if process.pid not in self._frozen and self._logs[process.pid].exists()
        ]

    def _resume(self, now: float) -> None:
        for process in self._processes:
            if process.pid in self._frozen and self._frozen[process.pid] <= now:
                del self._frozen[process.pid]
                process.send_signal(signal.SIGCONT)

    def _crash(self, report: Report) -> None:
        """Kill the server, whose asynchronous commits are gone, and start it again."""
        server, began = self.bench.server, time.monotonic()  # type: ignore[attr-defined]
        server.kill()
        server.start()
        self._look(report)
        report.outage = max(report.outage, time.monotonic() - began)

    def _look(self, report: Report) -> int:
        """Look which rows wait although their leases have run out. Return how many are not finished."""
        dialect = dialect_at(self.bench.url)
        age = AGES[dialect]
        began = time.monotonic()
        found = self.bench.ask(
            f"SELECT id, lease_token, {age} FROM jobs "
            f"WHERE state = 'queued' AND leased_until > {FREE[dialect]} AND {age} > 0"
        )
        waiting = {}
        for key, token, seconds in found:
            since = self._waiting.get((key, token), max(began - float(seconds), self._looked))
            waiting[key, token] = since
            report.unclaimed = max(report.unclaimed, began - since)
        self._waiting, self._looked = waiting, began
        left: int = self.bench.ask("SELECT count(*) FROM jobs WHERE state = 'queued'")[0][0]
        return left

    def _let_end(self) -> None:
        self._resume(math.inf)
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(Exception):
                process.wait(30)
            self._ended.setdefault(self._logs[process.pid], time.monotonic())

    def _longest(self, log: Path) -> float:
        """Return for how long a transaction of one process was open, by its log and by when it was killed."""
        longest, begun = 0.0, {}
        for line in log.read_text().splitlines() if log.exists() else ():
            what, number, at = line.split()
            if what == "b":
                begun[number] = float(at)
            else:
                longest = max(longest, float(at) - begun.pop(number))
        return max([longest, *(self._ended.get(log, at) - at for at in begun.values())])

    def _judge(self, report: Report) -> None:
        def count(condition: str) -> int:
            number: int = self.bench.ask(f"SELECT count(*) FROM {condition}")[0][0]
            return number

        report.unfinished = count("jobs WHERE state <> 'done'")
        report.again = count("jobs WHERE attempts > 1")
        report.twice = count("(SELECT job FROM effects GROUP BY job HAVING count(*) > 1) AS found")
        report.zombies = count("effects JOIN jobs ON jobs.id = effects.job WHERE effects.claim <> jobs.claim")
        report.without_effect = count(
            "jobs WHERE state = 'done' AND NOT EXISTS (SELECT 1 FROM effects WHERE effects.job = jobs.id)"
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/rows/torture.py", description=__doc__)
    parser.add_argument("kind", choices=["postgresql", "mariadb", "mysql", "sqlite"])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--mode", choices=[CANCELLED, PLAIN, *CONTROLS], default=CANCELLED)
    parser.add_argument("--crashes", action="store_true")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--slow", type=float, default=0.0015)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    heard = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if heard.seed is None else heard.seed
    with tempfile.TemporaryDirectory(prefix="rows-torture-", dir="/var/tmp") as made:
        folder = Path(made)
        with database(heard.kind, folder, crashes=heard.crashes) as bench:
            torture = Torture(
                bench,
                folder,
                mode=heard.mode,
                processes=heard.processes,
                slow=heard.slow,
                crashes=heard.crashes,
                seed=seed,
            )
            report = torture.run(heard.rows, heard.minutes * 60, until_caught=heard.mode in CONTROLS)
            complaints = Counter(
                line.partition(":")[0] for log in folder.glob("*.log") for line in log.read_text().splitlines()
            )
    sys.stdout.write(f"{heard.kind}, {heard.mode}, seed {seed}: {report}\n")
    sys.stdout.write(f"    errors outside of the SDK: {dict(complaints)}\n")
    if heard.mode in CONTROLS:
        return int(report.safe)
    return int(not (report.safe and report.complete and report.unclaimed <= report.bound))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
