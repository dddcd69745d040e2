"""
The client against a model of it, with any backend: what is held, by whom, until when, and with which token.

Time stands still between two rules and jumps when the machine says so, in the middle of everything, as in a process
that did not run. The heartbeat keeps no lease, so that every renewal is one that the model knows of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from fuzzing import repeated
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fencing_sdk import LeaseLostError, Lock, LockClient, LossReason, StaleTokenError
from fencing_sdk._client import on_clock
from fencing_sdk._lease import Lease
from fencing_sdk.abc import Backend
from fencing_sdk.guards.memory import MemoryGuard

TTL = 1000.0
BUFFER = 200.0
VALID = TTL * 0.99 - BUFFER
"""Seconds for which a lease is held without a renewal."""
NAMES = ("a", "b/ü")
PATIENCE = 20.0
"""Seconds after which what should happen soon has not happened."""
TAKEN_AWAY = {LossReason.REVOKED, LossReason.REFUSED, LossReason.TAKEN_OVER}

AGES = st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3, 5))
"""How many leases have begun since: mostly none, because a lease that ended long ago has little to say."""


class SteppedClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 5000.0

    def now(self) -> float:
        return self.at


@dataclass
class Bench:
    """One empty store."""

    connect: Callable[[], Backend]
    """Makes the backend of a client."""
    revoke: Callable[[str], Coroutine[Any, Any, None]]
    """Takes a lock away from its holder, as an operator would, or as if its ttl had ended."""


@dataclass
class Store:
    """A kind of store under test."""

    make: Callable[[SteppedClock], Bench]
    """Makes an empty one that lives by the clock."""
    examples: int = 30
    steps: int = 30


@dataclass
class Tenure:
    """What the model knows of a lease."""

    lease: Lease
    client: int
    token: int
    sent: float
    released: bool = False
    lost: LossReason | None = None
    given_back: bool = False
    revoked: bool = False
    """Whether it was taken away; the lease may not know it yet."""

    def held(self, now: float) -> bool:
        return not self.released and self.lost is None and now < self.sent + VALID

    def granted(self, now: float) -> bool:
        """Whether the store still has the grant."""
        return not self.given_back and now < self.sent + TTL

    def learn(self) -> None:
        """A lock that was taken away is lost as soon as the lease says so."""
        if self.revoked and not self.released and self.lost is None and not self.lease.held:
            self.lost = self.lease.lost_reason


class ClientsAndModel(RuleBasedStateMachine):
    """Two clients of one store, and what they should see. Made for a store by `check`."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.clock = SteppedClock()
        self.runner = asyncio.Runner()
        self.bench = self.store.make(self.clock)
        self.clients = [on_clock(LockClient(self.bench.connect()), self.clock) for _ in range(2)]
        self.tenures: list[Tenure] = []
        self.leases: list[Lease | None] = []  # kept until their client is closed, also where there should be none
        self.last: dict[str, int] = {}
        self.guard = MemoryGuard()
        self.fences: dict[str, int] = {}
        for client in self.clients:
            self.open(client)

    def open(self, client: LockClient) -> None:
        self.runner.run(client.__aenter__())

        heartbeat = client._engine._heartbeat
        send = heartbeat._send

        def send_for_waiters(_leases, tickets, now) -> None:
            if tickets:
                send((), tickets, now)

        heartbeat._send = send_for_waiters

    def tenure(self, age: int) -> Tenure:
        tenure = self.tenures[-1 - age % len(self.tenures)]
        tenure.learn()
        return tenure

    def held_tenures(self) -> list[Tenure]:
        return [holder for name in NAMES if (holder := self.holder(name)) is not None]

    def lock(self, client: int, name: str, **options: object) -> Lock:
        return self.clients[client].lock(name, ttl=TTL, safety_buffer=BUFFER, **options)

    def holder(self, name: str) -> Tenure | None:
        """Who has the lock in the eyes of the store."""
        holders = [one for one in self.tenures if one.lease.name == name and one.granted(self.clock.at)]
        assert len(holders) <= 1
        return holders[0] if holders else None

    def begin(self, lease: Lease, client: int) -> None:
        self.leases.append(lease)
        assert lease.token > self.last.get(lease.name, -1), "the token did not grow"
        self.last[lease.name] = int(lease.token)
        self.tenures.append(Tenure(lease, client, self.last[lease.name], self.clock.at))

    def end(self, tenure: Tenure) -> None:
        """Its holder is about to give it back."""
        if not tenure.held(self.clock.at) and tenure.lost is None and not tenure.released:
            tenure.lost = LossReason.EXPIRED  # by the clock, whichever word the engine has for it
        tenure.released = tenure.given_back = True

    @rule(client=st.integers(0, 1), name=st.sampled_from(NAMES), fenced=st.booleans())
    def try_acquire(self, client: int, name: str, fenced: bool) -> None:
        self.take(client, name, fenced=fenced)

    def take(self, client: int, name: str, *, fenced: bool = False) -> None:
        lock = self.lock(client, name, fences=[self.guard] if fenced else [])
        lease = self.runner.run(lock.try_acquire())
        if self.holder(name) is not None:
            self.leases.append(lease)
            assert lease is None, "granted while somebody else has it"
            return
        assert lease is not None, "refused although it is free"
        self.begin(lease, client)
        if fenced:
            self.fences[name] = self.last[name]

    @precondition(held_tenures)
    @rule(
        which=st.integers(0, 1),
        client=st.integers(0, 1),
        turns=st.sampled_from([0, 1, 2, 5, 20]),
        leaver=st.booleans(),
    )
    def hand_over(self, which: int, client: int, turns: int, leaver: bool) -> None:
        """The holder gives it back while somebody waits, perhaps behind one who leaves the line just then."""
        tenure = self.held_tenures()[which % len(self.held_tenures())]
        name = tenure.lease.name
        lock = self.lock(client, name)

        async def story() -> Lease:
            leaving = [asyncio.ensure_future(self.lock(1 - client, name).acquire())] if leaver else []
            waiting = asyncio.ensure_future(lock.acquire())
            tasks = [waiting, *leaving]
            for _ in range(turns):
                await asyncio.sleep(0)
            early = [task.result() for task in tasks if task.done()]
            self.leases += early
            for task in tasks if early else leaving:
                task.cancel()
            await tenure.lease.release()
            _, waiting_in_vain = await asyncio.wait(tasks, timeout=PATIENCE)
            for task in waiting_in_vain:
                task.cancel()
            await asyncio.wait(tasks)
            assert not early, "granted while somebody else has it"
            assert not waiting_in_vain, "nobody has it, and whoever waits does not get it"
            return waiting.result()

        self.end(tenure)
        self.begin(self.runner.run(story()), client)

    @precondition(held_tenures)
    @rule(which=st.integers(0, 1), taker=st.sampled_from([None, 0, 1]))
    def revoke(self, which: int, taker: int | None) -> None:
        """Perhaps somebody else has the lock before its holder learns of anything."""
        tenure = self.held_tenures()[which % len(self.held_tenures())]
        self.runner.run(self.bench.revoke(tenure.lease.name))
        tenure.given_back = tenure.revoked = True
        if taker is not None:
            self.take(taker, tenure.lease.name)

    @precondition(lambda self: self.tenures)
    @rule(age=AGES, later=st.sampled_from([0.0, 400.0, 600.0]))
    def renew(self, age: int, later: float) -> None:
        """Whoever still believes in a lease that was taken away learns of it here."""
        self.clock.at += later
        tenure = self.tenure(age)
        held = tenure.held(self.clock.at) and not tenure.revoked
        assert self.lost_by(lambda: self.runner.run(tenure.lease.renew())) is not held
        if held:
            tenure.sent = self.clock.at
        tenure.learn()
        assert tenure.lease.held is held
        assert tenure.lost in TAKEN_AWAY | {None, LossReason.CLOSED, LossReason.EXPIRED, LossReason.STALLED}

    @precondition(lambda self: self.tenures)
    @rule(age=AGES)
    def release(self, age: int) -> None:
        tenure = self.tenure(age)
        self.end(tenure)
        self.runner.run(tenure.lease.release())

    @precondition(lambda self: self.tenures)
    @rule(age=AGES, kept=st.booleans())
    def write(self, age: int, kept: bool) -> None:
        """With the token that the lease gives now, or with the number that was kept: the zombie."""
        tenure = self.tenure(age)
        name, fence = tenure.lease.name, self.fences.get(tenure.lease.name, -1)
        if not kept and not tenure.held(self.clock.at):
            assert self.lost_by(lambda: tenure.lease.token)
            return
        token = tenure.token if kept else tenure.lease.token
        try:
            self.guard.write(name, token, lambda: None)
            accepted = True
        except StaleTokenError:
            accepted = False
        assert accepted is (tenure.token >= fence)
        assert accepted or kept or tenure.revoked, "a token that could be read was stale"
        self.fences[name] = max(fence, tenure.token)

    @rule(client=st.integers(0, 1))
    def close(self, client: int) -> None:
        self.runner.run(self.clients[client].aclose())
        for tenure in self.tenures:
            if tenure.client == client:
                tenure.learn()
                if tenure.held(self.clock.at):
                    tenure.lost = LossReason.CLOSED
                tenure.given_back = True
        self.open(self.clients[client])

    @rule(seconds=st.sampled_from([400.0, 600.0, 3000.0]))
    def stall(self, seconds: float) -> None:
        self.clock.at += seconds

    @invariant()
    def leases_are_as_the_model_says(self) -> None:
        for tenure in self.tenures:
            tenure.learn()
            held = tenure.held(self.clock.at)
            assert tenure.lease.held is held
            assert self.lost_by(lambda lease=tenure.lease: lease.check()) is not held
            if tenure.lost is LossReason.CLOSED:
                assert tenure.lease.lost_reason is LossReason.CLOSED

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        for name in NAMES:
            holder = self.holder(name)
            seen = self.runner.run(self.clients[0].inspect(name))
            assert (seen and seen.token) == (holder and holder.token)

    def lost_by(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except LeaseLostError:
            return True
        return False

    def teardown(self) -> None:
        for client in self.clients:
            self.runner.run(client.aclose())
        self.runner.close()


def check(store: Store, *, shrink: bool = True) -> None:
    """Run the machine; raises what it finds. Without *shrink* the first story that fails will do."""
    machine = type("Machine", (ClientsAndModel,), {"store": store})
    found = tuple(phase for phase in Phase if phase is not Phase.explain and (shrink or phase is not Phase.shrink))
    chosen = settings(repeated(store.examples), stateful_step_count=store.steps, phases=found)
    run_state_machine_as_test(machine, settings=chosen)
