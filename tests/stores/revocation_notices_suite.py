"""
An operator takes a lock away on a store that tells of it on request: a message tells the holder, and it proves nothing.

The scenarios are written once. A store runs them by a subclass, which has a fixture ``bench`` and sends the messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from patience import until
from stays import Stay, eventually, opened, staying
from store_bench import WaitersBench

from fencing_sdk import LockClient, LossReason, connect
from fencing_sdk.backends._shared import losses

FAR = {"ttl": 3600.0, "heartbeat_interval": 900.0}
"""A lease whose next heartbeat is minutes away: what is noticed was pushed."""


def shorten_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold is long, and the store is asked again, after a moment that costs the tests less."""
    monkeypatch.setattr(losses, "_MOMENT", 0.05)
    monkeypatch.setattr(losses, "_LAST_PAUSE", 0.2)


def watcher(locks: LockClient) -> Any:
    return locks._backend._losses


async def listening(locks: LockClient) -> None:
    """Wait until messages arrive, and until all grants were looked at."""
    await until(lambda: watcher(locks)._listening and not watcher(locks)._task.running)


@asynccontextmanager
async def holding(url: str, *names: str, **options: str) -> AsyncIterator[tuple[LockClient, list[Stay]]]:
    """A client that holds some locks and listens."""
    async with opened(url, **options) as (locks, _):
        stays = [Stay(locks.lock(name, **FAR)) for name in names]
        for stay in stays:
            await stay.begun()
        await listening(locks)
        yield locks, stays
        for stay in stays:
            await stay.abandon()


async def heard(stay: Stay, reason: str = "hangs") -> None:
    await stay.over()
    assert stay.lost is LossReason.REVOKED
    assert stay.error.detail == reason


class RevocationNoticesSuite(ABC):
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shorten_the_moment(monkeypatch)

    def url(self, bench: WaitersBench) -> str:
        """What clients connect to."""
        return bench.url

    @abstractmethod
    async def listeners(self, bench: WaitersBench) -> int:
        """How many clients listen, as the store sees it."""

    async def none_listens(self, bench: WaitersBench) -> bool:
        return await self.listeners(bench) == 0

    @abstractmethod
    async def forge(self, bench: WaitersBench, locks: LockClient, name: str) -> None:
        """Send messages of a revocation of *name* that did not happen, one of them as the store would."""

    @abstractmethod
    async def leave_earlier_reason(self, bench: WaitersBench, name: str) -> None:
        """Keep a reason for the owner that holds *name*, as if an earlier grant to it was revoked."""

    @pytest.mark.every_loop
    async def test_the_holder_is_told_by_a_message_and_no_other_holder(self, bench):
        async with holding(self.url(bench), "a", "other") as (_, (stay, other)), connect(self.url(bench)) as operator:
            assert await self.listeners(bench) == 1
            assert await operator.revoke("a", token=stay.token, reason="hangs")
            await heard(stay)
            await other.end()

    async def test_a_client_tells_itself(self, bench):
        async with holding(self.url(bench), "a") as (locks, (stay,)):
            assert await locks.revoke("a", token=stay.token, reason="hangs")
            await heard(stay)

    async def test_all_readers_of_a_token_are_told_and_one_permit(self, bench):
        async with opened(self.url(bench)) as (locks, _), connect(self.url(bench)) as operator:
            guide, seats = locks.rwlock("guide", **FAR), locks.semaphore("seats", permits=2, **FAR)
            async with (
                staying(guide.reader) as one,
                staying(guide.reader) as two,
                staying(seats) as taken,
                staying(seats) as kept,
            ):
                await listening(locks)
                assert await operator.revoke("guide", token=one.token, reason="hangs")
                assert await operator.revoke("seats", token=taken.token, reason="hangs")
                for stay in (one, two, taken):
                    await heard(stay)
                await kept.end()

    async def test_a_message_proves_nothing(self, bench):
        """It may be forged, and a reason may be that of an earlier grant to the same owner."""
        async with holding(self.url(bench), "a", "b") as (locks, (kept, stay)):
            await self.leave_earlier_reason(bench, "a")
            await self.forge(bench, locks, "a")
            assert await locks.revoke("b", token=stay.token, reason="hangs")
            await heard(stay)  # messages arrive in order, so those before were looked at
            await kept.end()

    async def test_a_short_hold_does_not_listen(self, bench, monkeypatch):
        monkeypatch.setattr(losses, "_MOMENT", 600.0)
        async with opened(self.url(bench)) as (locks, _):
            for _ in range(20):
                async with locks.lock("a"):
                    pass
            assert await self.listeners(bench) == 0

    async def test_a_lock_that_was_released_is_watched_no_more(self, bench):
        async with holding(self.url(bench), "a", "b") as (locks, stays):
            assert len(watcher(locks)._held) == 2
            await stays[0].end()
            assert await locks.revoke("b", token=stays[1].token, reason="hangs")
            await heard(stays[1])
            await until(lambda: not watcher(locks)._held)

    async def test_a_client_that_holds_nothing_for_a_while_listens_no_more_until_it_holds_again(
        self, bench, monkeypatch
    ):
        monkeypatch.setattr(losses, "_IDLE", 0.05)
        async with opened(self.url(bench)) as (locks, _), connect(self.url(bench)) as operator:
            for _ in range(2):
                async with staying(locks.lock("a", **FAR)) as stay:
                    await listening(locks)
                    assert await self.listeners(bench) == 1
                    assert await operator.revoke("a", token=stay.token, reason="hangs")
                    await heard(stay)
                await eventually(lambda: self.none_listens(bench), what="none listens")

    async def test_a_client_that_is_closed_listens_no_more(self, bench):
        async with holding(self.url(bench), "a"):
            assert await self.listeners(bench) == 1
        await eventually(lambda: self.none_listens(bench), what="none listens")
