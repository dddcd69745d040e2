"""A job on four real processes whose clocks differ, which are killed and frozen: no tick runs twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from child_processes import guarded

pytest_plugins = ["redis_fixtures"]

WORKER = Path(__file__).parents[1] / "support" / "workers" / "job_worker.py"
INTERVAL, AT_LEAST, TTL, SKEW = 1.0, 0.6, 1.5, 0.2
SECONDS = 120.0
PATIENCE = 60.0


class Processes:
    """Four workers, and a chaos that ends or stops one of them now and then."""

    def __init__(self, url, folder):
        self.url, self.log = url, folder / "log.jsonl"
        self.chance = random.Random(7)
        self.faults = Counter()
        self.workers = [self.start() for _ in range(4)]

    def start(self):
        skew = self.chance.uniform(-SKEW, SKEW)
        numbers = [str(number) for number in (skew, INTERVAL, AT_LEAST, TTL)]
        command = guarded([sys.executable, str(WORKER), self.url, str(self.log), *numbers])
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    def lines(self):
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def until_each_has_asked(self):
        end = time.monotonic() + PATIENCE
        while len({line["pid"] for line in self.lines()}) < len(self.workers):
            assert time.monotonic() < end, "a worker does not start"
            time.sleep(0.05)

    def trouble(self):
        """Meant for the one that works now, so that it hits a run."""
        busy = {line["pid"] for line in self.lines()[-4:] if line["what"] == "began"}
        at_work = [number for number, worker in enumerate(self.workers) if worker.pid in busy]
        number = self.chance.choice(at_work or range(4))
        worker = self.workers[number]
        if self.chance.random() < 0.3:
            self.faults["killed"] += 1
            self.end(worker)
            self.workers[number] = self.start()
        else:
            self.faults["frozen"] += 1
            worker.send_signal(signal.SIGSTOP)
            time.sleep(self.chance.choice((0.1, 0.5, 2.0)))
            worker.send_signal(signal.SIGCONT)

    def end(self, worker):
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stderr.close()


@contextmanager
def processes_on(url, folder):
    processes = Processes(url, folder)
    try:
        yield processes
    finally:
        for worker in processes.workers:
            processes.end(worker)


def runs_of(lines):
    """Every run: when it was granted, when it began, and what its call was told."""
    runs, open_runs = [], {}
    for line in lines:
        if line["what"] == "began":
            open_runs[line["pid"]] = run = {**line, "outcome": ""}
            runs.append(run)
        elif line["what"] == "told" and (run := open_runs.pop(line["pid"], None)) is not None:
            run["outcome"] = line["outcome"]
    return sorted(runs, key=lambda run: run["granted"])


@pytest.mark.slow  # the same game on virtual time is in test_job_ticks.py
def test_no_tick_runs_twice_on_one_machine(tmp_path):
    with processes_on(f"sqlite:///{tmp_path}/locks.db", tmp_path) as processes:
        play(processes)


@pytest.mark.slow  # the same game on virtual time is in test_job_ticks.py
def test_no_tick_runs_twice_on_a_server(tmp_path, redis_server):
    with processes_on(redis_server.url, tmp_path) as processes:
        play(processes)


def play(processes):
    processes.until_each_has_asked()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(processes.chance.uniform(0.2, 1.0))
        processes.trouble()
    time.sleep(INTERVAL)
    dead = [worker for worker in processes.workers if worker.poll() is not None]
    assert not dead, dead[0].stderr.read()
    lines = processes.lines()
    runs = runs_of(lines)
    for earlier, later in pairwise(runs):
        if earlier["outcome"] == "Ran":
            assert later["began"] - earlier["granted"] >= AT_LEAST, f"{earlier} and {later}"
    heard = Counter(line["outcome"] for line in lines if line["what"] == "told")
    asked = Counter(line["pid"] for line in lines if line["what"] == "asked")
    answered = Counter(line["pid"] for line in lines if line["what"] == "told")
    assert all(asked[pid] - answered[pid] in {0, 1} for pid in asked), "a call ended, and was not told"
    assert heard["Ran"] >= SECONDS / 8, heard
    assert heard["Skipped"] >= heard["Ran"], heard
    assert processes.faults["killed"], processes.faults
    assert processes.faults["frozen"], processes.faults
