"""Many histories, in several processes: what was observed, which seeds failed, and how fast it went."""

from __future__ import annotations

import gc
import itertools
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from threading import Event

from fencing_sdk._values.observers import keep_off_console
from tests.simulation.judge import Report, Verdict
from tests.simulation.play import play
from tests.simulation.script import Script, write_script

_PART = 100
"""Histories that one process plays before it reports."""
_AHEAD = 4
"""Parts for each process that are given out before the oldest is waited for."""
_ALLOCATIONS = 20_000
"""Objects after which a process looks for garbage. A tenth of the time, and a few megabytes, of the default."""
LEAST = 25
"""Acquisitions below which a campaign shows nothing."""
Progress = Callable[["Campaign"], object]
_stopped = Event()


@dataclass(slots=True)
class Campaign:
    """The outcome of many histories."""

    histories: int = 0
    seconds: float = 0.0
    report: Report = field(default_factory=Report)
    failed: dict[int, list[str]] = field(default_factory=dict)
    """Seed -> the rules it broke."""
    interrupted: bool = False
    """Whether it was ended before all histories were played."""

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


Writer = Callable[[int], Script]
"""From a seed to its script: `write_script`, `write_share_script` or `write_election_script`."""


def play_seeds(seeds: Iterable[int], write: Writer = write_script) -> Campaign:
    """Play the histories of *seeds*, here and now."""
    campaign = Campaign()
    begun = time.perf_counter()
    for seed in seeds:
        report = play(write(seed)).report
        campaign.histories += 1
        campaign.report.add(report)
        if report.violations:
            campaign.failed[seed] = sorted(report.rules)
    campaign.seconds = time.perf_counter() - begun
    return campaign


def run_campaign(
    first: int, histories: int, jobs: int, progress: Progress | None = None, write: Writer = write_script
) -> Campaign:
    """
    Play *histories* seeds from *first* on, in as many processes as *jobs*.

    The outcome does not depend on the number of processes, except for the time. *progress* is
    called with what is known so far, whenever a part is done. An interrupt from the keyboard, which
    reaches every process, ends it with what is known by then.
    """
    whole = Campaign()
    begun = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_work) as pool:
        try:
            for part in _in_order(pool, _parts(first, histories), jobs * _AHEAD, write):
                whole.add(part)
                whole.seconds = time.perf_counter() - begun
                if progress is not None:
                    progress(whole)
        except KeyboardInterrupt:
            whole.interrupted = True
            pool.shutdown(wait=False, cancel_futures=True)
    return whole


def _begin_work() -> None:
    """Prepare a process: no logs, an interrupt ends its part, garbage is looked for once or twice a history."""
    keep_off_console()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job goes on, and misses nothing
        signal.signal(signal.SIGINT, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # what was imported is never garbage
    gc.set_threshold(_ALLOCATIONS, 10, 10)


def _stop(_signal: int, _frame: object) -> None:
    _stopped.set()


def _play_part(seeds: range, write: Writer) -> Campaign:
    return play_seeds(itertools.takewhile(lambda _: not _stopped.is_set(), seeds), write)


def _parts(first: int, histories: int) -> Iterator[range]:
    end = first + histories
    return (range(start, min(start + _PART, end)) for start in range(first, end, _PART))


def _in_order(pool: ProcessPoolExecutor, parts: Iterable[range], ahead: int, write: Writer) -> Iterator[Campaign]:
    """Play *parts* side by side; yield their outcomes in their order, and keep none."""
    given: deque[Future[Campaign]] = deque()
    for part in parts:
        given.append(_submit(pool, part, write))
        if len(given) >= ahead:
            yield given.popleft().result()
    while given:
        yield given.popleft().result()


def _submit(pool: ProcessPoolExecutor, part: range, write: Writer) -> Future[Campaign]:
    """Give *part* to the pool. If that starts a process, an interrupt waits until the process is prepared for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_play_part, part, write)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
