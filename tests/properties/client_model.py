"""
The client against a model of it, with any backend: what is held, by whom, until when, and with which token.

Time stands still between two rules and jumps when the machine says so, in the middle of everything, as in a process
that did not run. The heartbeat is kept from beating, so that every renewal is one that the model knows of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
from fuzzing import checked
from hypothesis import Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fencing_sdk import LeaseLostError, LockClient, LossReason, StaleTokenError
from fencing_sdk._lease import Lease
from fencing_sdk.abc import Backend
from fencing_sdk.guards.memory import MemoryGuard

TTL = 1000.0
BUFFER = 200.0
VALID = TTL * 0.99 - BUFFER
"""Seconds for which a lease is held without a renewal."""
NAMES = ("a", "b/ü")


class SteppedClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 5000.0

    def now(self) -> float:
        return self.at


@dataclass
class Store:
    """A backend under test."""

    make: Callable[[SteppedClock], Callable[[], Backend]]
    """Makes an empty store that lives by the clock, and from it the backend of each client."""
    follows: bool = True
    """Whether the store lives by the clock; a server does not."""
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

    def held(self, now: float) -> bool:
        return not self.released and self.lost is None and now < self.sent + VALID

    def granted(self, now: float) -> bool:
        """Whether the store still has the grant."""
        return not self.given_back and now < self.sent + TTL


class ClientsAndModel(RuleBasedStateMachine):
    """Two clients of one store, and what they should see. Made for a store by `check`."""

    store: Store
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = SteppedClock()
        connect = self.store.make(self.clock)
        self.runner = asyncio.Runner()
        self.clients = [LockClient(connect(), clock=self.clock, watch_stalls=False) for _ in range(2)]
        self.tenures: list[Tenure] = []
        self.last: dict[str, int] = {}
        self.guard = MemoryGuard()
        self.fences: dict[str, int] = {}
        for client in self.clients:
            self.runner.run(self.open(client))

    async def open(self, client: LockClient) -> None:
        await client.__aenter__()

        async def rest() -> None: ...

        client._engine._heartbeat._beat = rest

    def holder(self, name: str) -> Tenure | None:
        """Who has the lock in the eyes of the store."""
        holders = [one for one in self.tenures if one.lease.name == name and one.granted(self.clock.at)]
        assert len(holders) <= 1
        return holders[0] if holders else None

    @rule(target=leases, client=st.integers(0, 1), name=st.sampled_from(NAMES), fenced=st.booleans())
    def try_acquire(self, client: int, name: str, fenced: bool) -> object:
        fences = [self.guard] if fenced else []
        lock = self.clients[client].lock(name, ttl=TTL, safety_buffer=BUFFER, fences=fences)
        lease = self.runner.run(lock.try_acquire())
        if self.holder(name) is not None:
            assert lease is None, "granted while somebody else has it"
            return multiple()
        assert lease is not None, "refused although it is free"
        assert lease.token > self.last.get(name, -1), "the token did not grow"
        self.last[name] = int(lease.token)
        if fenced:
            self.fences[name] = self.last[name]
        tenure = Tenure(lease, client, self.last[name], self.clock.at)
        self.tenures.append(tenure)
        return tenure

    @rule(tenure=leases)
    def renew(self, tenure: Tenure) -> None:
        held = tenure.held(self.clock.at)
        assert self.lost_by(lambda: self.runner.run(tenure.lease.renew())) is not held
        if held:
            tenure.sent = self.clock.at

    @rule(tenure=leases)
    def release(self, tenure: Tenure) -> None:
        if not tenure.held(self.clock.at) and tenure.lost is None and not tenure.released:
            tenure.lost = LossReason.EXPIRED  # by the clock, whichever word the engine has for it
        self.runner.run(tenure.lease.release())
        tenure.released = tenure.given_back = True

    @rule(tenure=leases, kept=st.booleans())
    def write(self, tenure: Tenure, kept: bool) -> None:
        """With the token that the lease gives now, or with the number that was kept: the zombie."""
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
        assert accepted or kept, "a token that could be read was stale"
        self.fences[name] = max(fence, tenure.token)

    @rule(client=st.integers(0, 1))
    def close(self, client: int) -> None:
        self.runner.run(self.clients[client].aclose())
        for tenure in self.tenures:
            if tenure.client == client:
                if tenure.held(self.clock.at):
                    tenure.lost = LossReason.CLOSED
                tenure.given_back = True
        self.runner.run(self.open(self.clients[client]))

    @precondition(lambda self: self.store.follows)
    @rule(seconds=st.sampled_from([400.0, 600.0, 3000.0]))
    def stall(self, seconds: float) -> None:
        self.clock.at += seconds

    @invariant()
    def leases_are_as_the_model_says(self) -> None:
        for tenure in self.tenures:
            held = tenure.held(self.clock.at)
            assert tenure.lease.held is held
            assert self.lost_by(lambda lease=tenure.lease: lease.check()) is not held
            if tenure.lost is LossReason.CLOSED:
                assert tenure.lease.lost_reason is LossReason.CLOSED

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        for name in NAMES:
            seen = self.runner.run(self.clients[0].inspect(name))
            holder = self.holder(name)
            assert (None if seen is None else seen.token) == (None if holder is None else holder.token)

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
    chosen = settings(checked(store.examples), stateful_step_count=store.steps, phases=found)
    run_state_machine_as_test(machine, settings=chosen)
