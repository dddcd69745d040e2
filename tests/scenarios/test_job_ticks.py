"""
Many ticks of a job on four processes whose clocks differ, which are killed, frozen and cut off: on virtual time.

    not twice     after a run that was told as ran, none begins for ``at_least_for`` seconds after its grant; nor after
                  one that was told as failed, in the worlds that keep the lock on any end
    not at once   no run begins while another one goes on in a process that runs and believes in its lease
    told          every call ends with one outcome, unless its process was killed
    not lost      where all calls of a tick were skipped, a run that holds the lock had begun before
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from campaigns import amount

import fencing_sdk.recipes.jobs
from fencing_sdk import FencingError, current_lease
from fencing_sdk.testing import World

TICKS = 50
"""In one world. Ten thousand in the campaign: 200 worlds."""
WORLDS = amount(200, short=6)
INTERVAL, AT_LEAST, TTL = 60.0, 30.0, 5.0
SKEW = 12.0
"""Seconds by which the wall clock of a process may be ahead or behind: two of them differ by less than `AT_LEAST`."""
PROCESSES = 4
MAX_HOLD = 50.0
SLACK = 6.0
"""Seconds for messages that are slow, and for an attempt at parking that is repeated."""
EXACT = 0.985
"""How short a time of one process may look to another: their clocks run at rates that differ by up to 1 %."""


class Mine(Exception):
    """What a run that fails raises."""


@dataclass
class Call:
    """One call of the job, as the world sees it."""

    tick: int
    slot: "Slot" = field(repr=False)
    client: object
    asked: float
    began: float | None = None
    ended: float | None = None
    lease: object = field(default=None, repr=False)
    outcome: str = ""

    def believes(self):
        """Whether its function runs, in a process that runs, under a lease that this process takes for held."""
        return self.began is not None and self.ended is None and not self.client.paused and self.lease.held

    def killed(self):
        return self.client is not self.slot.client

    def lock_ends(self):
        """The moment by which the lock that this run got is free again."""
        if self.outcome in {"Ran", "failed"}:
            return max(self.ended, self.began + AT_LEAST / EXACT) + SLACK
        return self.began + MAX_HOLD + TTL + SLACK


@dataclass
class Slot:
    """One of the four processes, and those that replace it after it was killed."""

    client: object
    skew: float
    number: int
    lives: int = 0
    events: list = field(default_factory=list)


class Ticks:
    """One world: processes, faults, and every call."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.at_least_on = "any" if seed % 2 else "success"
        self.world = World(seed, latency=(0.001, 0.05), service_rate=self.chance.uniform(0.996, 1.004))
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self.slots = [
            Slot(self.spawn(number, 0), self.chance.uniform(-SKEW, SKEW), number) for number in range(PROCESSES)
        ]
        self.faults = dict.fromkeys(("kill", "freeze", "cut", "slow", "fail"), 0)

    def spawn(self, number: int, life: int):
        return self.world.client(f"p{number}.{life}", clock_rate=self.chance.uniform(0.997, 1.003))

    def play(self) -> None:
        with self.world:
            for tick in range(TICKS):
                for slot in self.slots:
                    self.world.after((tick + 0.5) * INTERVAL + slot.skew, lambda s=slot, t=tick: self.call(s, t))
                if self.chance.random() < 0.7:
                    self.world.after((tick + 0.5) * INTERVAL + self.chance.uniform(-SKEW, 2 * SKEW), self.fault)
            self.world.sleep((TICKS + 1) * INTERVAL)
            self.judge()

    def call(self, slot: Slot, tick: int) -> None:
        client = slot.client
        call = Call(tick, slot, client, self.world.now)
        self.calls.append(call)
        duration = self.chance.choice((0.05, 0.5, 3.0, 12.0, 40.0))
        fails = self.chance.random() < 0.1

        @client.locks.job("nightly", at_least_for=AT_LEAST, at_least_on=self.at_least_on, ttl=TTL, max_hold=MAX_HOLD)
        async def nightly():
            self.begin(call)
            try:
                await asyncio.sleep(duration)
                if fails:
                    self.faults["fail"] += 1
                    raise Mine
            finally:
                call.ended = self.world.now

        async def run():
            try:
                outcome = await nightly()
            except Mine as error:
                call.outcome = "failed, and the lock is lost" if hasattr(error, "__notes__") else "failed"
            except FencingError as error:
                call.outcome = type(error).__name__
            else:
                call.outcome = type(outcome).__name__

        client.start(run)

    def begin(self, call: Call) -> None:
        call.began, call.lease = self.world.now, current_lease()
        for other in self.calls:
            if other is not call and other.believes():
                self.violations.append(f"at once: {other} and {call}")

    def fault(self) -> None:
        """Of those that work now, if there are any, else of all."""
        busy = [call.slot for call in self.calls[-2 * PROCESSES :] if call.began is not None and call.ended is None]
        slot = self.chance.choice(busy or self.slots)
        what = self.chance.choice(("kill", "freeze", "freeze", "cut", "slow"))
        self.faults[what] += 1
        client, span = slot.client, self.chance.choice((0.3, 2.0, 6.0, 20.0))
        if what == "kill":
            client.pause()
            slot.lives += 1
            slot.client = self.spawn(slot.number, slot.lives)
        elif what == "freeze" and not client.paused:
            client.pause()
            self.world.after(span, lambda: client.resume() if client is slot.client else None)
        elif what == "cut":
            client.link.drop()
            self.world.after(span, client.link.heal)
        elif what == "slow":
            client.link.delay(self.chance.uniform(0.1, 2.0))
            self.world.after(span, client.link.heal)

    def judge(self) -> None:
        runs = sorted((call for call in self.calls if call.began is not None), key=lambda call: call.began)
        keeping = {"Ran", "failed"} if self.at_least_on == "any" else {"Ran"}
        for earlier, later in pairwise(runs):
            if earlier.outcome in keeping and later.began - earlier.began < AT_LEAST * EXACT:
                self.violations.append(f"twice: {earlier} and {later}")
        for tick in range(TICKS):
            self.judge_tick(runs, [call for call in self.calls if call.tick == tick])

    def judge_tick(self, runs: list[Call], calls: list[Call]) -> None:
        self.violations += [f"not told: {call}" for call in calls if not call.outcome and not call.killed()]
        if all(call.outcome == "Skipped" for call in calls):
            for call in calls:
                if not any(run.began - SLACK <= call.asked <= run.lock_ends() for run in runs):
                    self.violations.append(f"lost: {call}")


def play(seed: int) -> Ticks:
    ticks = Ticks(seed)
    ticks.play()
    return ticks


@pytest.mark.campaign
def test_no_tick_runs_twice_and_none_is_lost_without_being_told():
    outcomes, faults = Counter(), Counter()
    for seed in range(WORLDS):
        ticks = play(seed)
        assert not ticks.violations, f"seed {seed}: {ticks.violations[0]}"
        outcomes.update(call.outcome or "killed" for call in ticks.calls)
        faults.update(ticks.faults)
    assert outcomes["Ran"] > WORLDS * TICKS / 3, outcomes
    assert outcomes["Skipped"] > outcomes["Ran"], outcomes
    assert {"failed", "LeaseLostError", "killed"} <= outcomes.keys(), outcomes
    assert all(faults.values()), faults


def found(seeds: int) -> set[str]:
    return {violation.partition(":")[0] for seed in range(seeds) for violation in play(seed).violations}


async def release(state, at_least_for, **_):
    """What a lock does that is not a job's."""
    state.keep_for = 0.0


async def forget(state, at_least_for, **_):
    """The lease is renewed no more, and the store keeps it for the rest of its ttl only."""
    if state.held and state.held_for < at_least_for:
        await state.keeper.park(state, min(at_least_for, state.held_for + 5))


@pytest.mark.parametrize("broken", [release, forget])
def test_a_job_that_does_not_keep_its_lock_is_caught(monkeypatch, broken):
    monkeypatch.setattr(fencing_sdk.recipes.jobs, "keep", broken)
    assert "twice" in found(2)


def test_a_job_that_swallows_its_end_is_caught(monkeypatch):
    monkeypatch.setattr(Ticks, "call", silent(Ticks.call))
    assert "not told" in found(1)


def silent(call):
    def wrapped(self, slot, tick):
        call(self, slot, tick)
        if self.chance.random() < 0.01:
            self.calls.append(Call(tick, slot, slot.client, self.world.now))

    return wrapped


def test_a_lock_that_stays_taken_for_ever_is_caught(monkeypatch):
    async def for_ever(state, at_least_for, **_):
        await state.keeper.park(state, 1e6)

    monkeypatch.setattr(fencing_sdk.recipes.jobs, "keep", for_ever)
    assert "lost" in found(1)
