"""
``revoke`` races with release, renewal, expiry, the next grant and another ``revoke``, thousands of times.

Two operators look at a lock, and take it away by the token that they saw, at once or when another holder may have it.
Clients hold it, renew it and release it; other processes die with it, so that it expires. Each call takes its time on
the way there and on the way back. All of it runs on virtual time, from a seed.
"""

import asyncio
import random

import pytest
from campaigns import amount
from inside import LoopClock, on_clock
from virtual_time import in_virtual_time

from fencing_sdk import LeaseLostError, LockClient, LossReason
from fencing_sdk.abc import Busy, Claim, Grant, Holder
from fencing_sdk.backends.memory import MemoryBackend

NAME = "nightly"
TTL = 2.0
ROUNDS = amount(10_000, short=150)
"""Calls of ``revoke`` in each history."""


class DistantStore(MemoryBackend):
    """The memory store behind a network: a call takes up to 30 ms on each way, and sometimes longer."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(tokens="counter")
        self._clock = LoopClock()
        self._dice = dice

    async def _travel(self) -> None:
        await asyncio.sleep(self._dice.choice((0.0, 0.001, 0.03, 0.03, 0.2)) * self._dice.random())

    async def acquire(self, claim: Claim) -> Grant | Busy:
        await self._travel()
        answer = await super().acquire(claim)
        await self._travel()
        return answer

    async def renew(self, claims):
        await self._travel()
        answer = await super().renew(claims)
        await self._travel()
        return answer

    async def release(self, claim: Claim) -> None:
        await self._travel()
        await super().release(claim)
        await self._travel()

    async def inspect(self, name: str) -> Holder | None:
        holder = await super().inspect(name)
        await self._travel()
        return holder

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        await self._travel()
        answer = await super().revoke(name, token, reason)
        await self._travel()
        return answer


class StoreThatComparesBefore(DistantStore):
    """The mistake: the token is compared in one call, and the lock taken away in the next."""

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        seen = await self.inspect(name)
        if seen is None or seen.token != token:
            return False
        await self._travel()
        now = await MemoryBackend.inspect(self, name)
        return now is not None and await MemoryBackend.revoke(self, name, now.token, reason)


class History:
    """Clients, processes that die, and two operators, at one lock."""

    def __init__(self, store: DistantStore, dice: random.Random) -> None:
        self.store = store
        self.dice = dice
        self.asked: set[int] = set()
        """Tokens that an operator named."""
        self.ended: list[int] = []
        """Tokens of which an operator was told that the grant was taken away."""
        self.highest = 0
        """The token of the latest lease."""
        self.lost: list[LeaseLostError] = []
        self.over = asyncio.Event()

    async def hold(self, locks: LockClient) -> None:
        """Acquire, work, and release, until the history is over."""
        while not self.over.is_set():
            before = self.highest
            try:
                async with locks.lock(NAME, ttl=TTL) as lease:
                    assert lease.token > before, "tokens fell"
                    self.highest = lease.token
                    await asyncio.sleep(self.dice.choice((0.0, 0.1, 0.5, 3.0)) * self.dice.random())
            except LeaseLostError as error:
                self.lost.append(error)

    async def die(self) -> None:
        """Acquire, and never renew or release."""
        while not self.over.is_set():
            await asyncio.sleep(1.0)
            before = self.highest
            grant = await self.store.acquire(Claim(NAME, self.dice.uniform(0.05, 0.3)))
            if isinstance(grant, Grant):
                assert grant.token > before, "tokens fell"

    async def operate(self, operator: LockClient) -> None:
        """Look, and take away what was seen."""
        while len(self.asked) < ROUNDS and not self.over.is_set():
            seen = await operator.inspect(NAME)
            if seen is None:
                await asyncio.sleep(0.01)
                continue
            await asyncio.sleep(self.dice.choice((0.0, 0.01, 0.1, 0.4)) * self.dice.random())
            self.asked.add(seen.token)
            if await operator.revoke(NAME, token=seen.token, reason=f"token {seen.token}"):
                self.ended.append(seen.token)
        self.over.set()

    def check(self) -> None:
        ended = set(self.ended)
        assert len(ended) == len(self.ended), "two operators were told of one grant"
        for error in self.lost:
            assert error.token in ended, "a successor was hit"
            if error.reason is LossReason.REVOKED:
                assert error.detail == f"token {error.token}", "a successor was hit"
            else:  # it was over before its client knew that it had it, so no notice found it
                assert error.reason in {LossReason.TAKEN_OVER, LossReason.REFUSED}
        heard = sum(error.reason is LossReason.REVOKED for error in self.lost)
        assert heard >= len(self.lost) * 0.8


async def play(store: DistantStore, dice: random.Random) -> History:
    history = History(store, dice)
    clients = [on_clock(LockClient(store), LoopClock()) for _ in range(4)]
    for client in clients:
        await client.__aenter__()
    try:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(history.hold(client))
            tasks.create_task(history.die())
            for client in clients[:2]:
                tasks.create_task(history.operate(client))
    finally:
        for client in clients:
            await client.aclose()
    history.check()
    return history


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
def test_a_successor_is_never_hit_and_tokens_never_fall(seed):
    async def main():
        dice = random.Random(seed)
        history = await play(DistantStore(dice), dice)
        assert len(history.ended) > ROUNDS / 4, "most revocations came too late: nothing raced"
        assert len(history.asked) - len(history.ended) > ROUNDS / 10, "none came too late: nothing raced"
        assert len(history.lost) > ROUNDS / 10

    in_virtual_time(main)()


def test_a_race_catches_a_comparison_before_the_step():
    async def main():
        dice = random.Random(0)
        await play(StoreThatComparesBefore(dice), dice)

    with pytest.raises(AssertionError, match=r"a successor was hit|two operators"):
        in_virtual_time(main)()
