"""Many histories, in several processes: what was observed, which seeds failed, and how fast it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from fencing_sdk.testing.history import Report, Verdict
from fencing_sdk.testing.simulation._play import play
from fencing_sdk.testing.simulation._script import write_script

_CHUNK = 250
"""Histories that one process plays before it reports."""
LEAST = 25
"""Acquisitions below which a campaign shows nothing."""
Progress = Callable[["Campaign"], object]


@dataclass(slots=True)
class Campaign:
    """The outcome of many histories."""

    histories: int = 0
    seconds: float = 0.0
    report: Report = field(default_factory=Report)
    failed: dict[int, list[str]] = field(default_factory=dict)
    """Seed -> the rules it broke."""

    @property
    def rate(self) -> float:
        """Histories per second of real time."""
        return self.histories / self.seconds if self.seconds else 0.0

    @property
    def verdict(self) -> Verdict:
        """A pass only if every promise was put to the test."""
        return self.report.verdict(least=LEAST)

    def add(self, other: Campaign) -> None:
        """Count another part in."""
        self.histories += other.histories
        self.report.add(other.report)
        self.failed.update(other.failed)


def play_seeds(seeds: Iterable[int]) -> Campaign:
    """Play the histories of *seeds*, here and now."""
    campaign = Campaign()
    begun = time.perf_counter()
    for seed in seeds:
        report = play(write_script(seed)).report
        campaign.histories += 1
        campaign.report.add(report)
        if report.violations:
            campaign.failed[seed] = sorted(report.rules)
    campaign.seconds = time.perf_counter() - begun
    return campaign


def run_campaign(first: int, histories: int, processes: int, progress: Progress | None = None) -> Campaign:
    """
    Play *histories* seeds from *first* on, in as many *processes*.

    *progress* is called with what is known so far, whenever a part is done.
    """
    whole = Campaign()
    begun = time.perf_counter()
    ends = range(first, first + histories, _CHUNK)
    parts = [range(start, min(start + _CHUNK, first + histories)) for start in ends]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[Campaign]] = {pool.submit(play_seeds, part) for part in parts}
        for done in as_completed(waiting):
            waiting.discard(done)  # a million histories are four thousand reports: none is kept
            whole.add(done.result())
            whole.seconds = time.perf_counter() - begun
            if progress is not None:
                progress(whole)
    return whole
