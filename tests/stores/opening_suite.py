"""
A store that is away when a client needs it first: the wait for a lock waits for the store, too.

The scenarios are written once, for tasks and for threads. A store runs them by a subclass with a fixture ``bench``, and
with `away` where it has no network before it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from stays import PATIENCE
from store_bench import StoreBench, nothing_left

import fencing_sdk.sync
from fencing_sdk import BackendUnavailableError, connect

LONG = 60.0
"""Seconds for a server that begins to listen, on a machine that stands still."""


class Tries:
    """A back-off, and so a witness: it is asked after each try that the store did not answer."""

    def __init__(self) -> None:
        self.number = 0
        self.twice = threading.Event()

    def __call__(self, _: object) -> float:
        self.number += 1
        if self.number == 2:
            self.twice.set()
        return 0.1


@pytest.mark.parametrize("world", ["tasks", "threads"])
class OpeningSuite:
    @contextmanager
    def away(self, bench: StoreBench) -> Iterator[str]:
        """Have no server behind the URL that is yielded, until the end of the block."""
        bench.proxy.refuse()
        yield bench.by_proxy
        bench.proxy.heal()

    async def hold(self, world: str, url: str, **options: object) -> int:
        """Take a lock by a client that nothing has opened, and return the token."""
        if world == "tasks":
            async with connect(url, open_wait=None) as locks, locks.lock("a", ttl=30, **options) as lease:
                return int(lease.token)

        def hold() -> int:
            locks = fencing_sdk.sync.connect(url)
            try:
                with locks.lock("a", ttl=30, **options) as lease:
                    return int(lease.token)
            finally:
                locks.close()

        return await asyncio.to_thread(hold)

    @pytest.mark.slow
    async def test_a_server_that_starts_after_the_wait_has_begun_is_waited_for(self, world: str, bench: StoreBench):
        tries = Tries()
        with self.away(bench) as url:
            holding = asyncio.create_task(self.hold(world, url, wait=LONG, backoff=tries))
            assert await asyncio.to_thread(tries.twice.wait, LONG)
            assert not holding.done()
        assert await holding >= 0
        await nothing_left(bench)

    async def test_a_server_that_never_starts_is_the_error_at_the_end_of_the_wait(self, world: str, bench: StoreBench):
        with self.away(bench) as url:
            with pytest.raises(BackendUnavailableError, match="; waited ") as over:
                await self.hold(world, url, wait=0.5)
            assert over.value.waited >= 0.5
        await nothing_left(bench)

    async def test_without_patience_it_is_asked_once(self, world: str, bench: StoreBench):
        tries = Tries()
        with self.away(bench) as url:
            with pytest.raises(BackendUnavailableError) as refused:
                await self.hold(world, url, wait=0, backoff=tries)
            assert (refused.value.operation, refused.value.waited, tries.number) == ("open", None, 0)
        await nothing_left(bench)

    async def open(self, world: str, url: str, **options: object) -> None:
        """Open a client, and close it."""
        if world == "tasks":
            async with connect(url, **options) as locks:
                assert await locks.inspect("a") is None
            return

        def open_in_a_thread() -> None:
            with fencing_sdk.sync.connect(url, **options) as locks:
                assert locks.inspect("a") is None

        await asyncio.to_thread(open_in_a_thread)

    async def test_a_client_that_is_opened_alone_is_told_at_once(self, world: str, bench: StoreBench):
        with self.away(bench) as url, pytest.raises(BackendUnavailableError):
            await self.open(world, url)
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_a_client_that_is_opened_alone_waits_as_long_as_it_was_told(self, world: str, bench: StoreBench):
        with self.away(bench) as url:
            opening = asyncio.create_task(self.open(world, url, open_wait=LONG))
            with pytest.raises(BackendUnavailableError):  # which takes longer than a first try
                await self.hold(world, url, wait=0.5)
            assert not opening.done()
        await asyncio.wait_for(opening, PATIENCE + LONG)
        await nothing_left(bench)
