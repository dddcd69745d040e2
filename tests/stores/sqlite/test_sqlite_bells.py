"""The datagrams that ring for the tickets of a lock file, and clients that have no socket for them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from revoking_suite import revoked
from stays import LONG, Stay, opened, staying
from store_bench import SqliteBench, nothing_left

from fencing_sdk.backends.sqlite.sockets import BellSocket, open_bell_socket, send_datagram


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
async def bell_socket(heard: list[str]) -> Iterator[BellSocket]:
    made = open_bell_socket(heard.append)
    assert made is not None
    yield made
    made.close()


@pytest.mark.every_loop
async def test_whatever_a_stranger_sends_is_passed_on_as_text_and_the_next_is_heard(
    bell_socket: BellSocket, heard: list[str]
):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"2", b"\xff\x00", b"x" * 5000):
            stranger.sendto(noise, b"\0fencing-sdk/" + bell_socket.name.encode())
    assert send_datagram(bell_socket.name, "last")
    async with asyncio.timeout(10):
        while "last" not in heard:  # noqa: ASYNC110  (the loop reads the socket)
            await asyncio.sleep(0)
    assert heard[1] == "2"
    assert len(heard) == 5


@pytest.mark.every_loop
async def test_a_socket_that_is_full_is_not_taken_for_gone():
    full, name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), os.urandom(16).hex()
    with full:
        full.bind(b"\0fencing-sdk/" + name.encode())
        assert all(send_datagram(name, "x") for _ in range(2000))
    assert not send_datagram(name, "x")


@pytest.mark.every_loop
async def test_without_such_sockets_waiters_and_holders_learn_from_their_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "platform", "darwin")
    bench = SqliteBench(tmp_path / "locks.db")
    async with opened(bench.url) as (locks, _), staying(locks.lock("a", ttl=60)) as stay:
        waiter = Stay(locks.lock("a", **LONG))
        await bench.waiting("a", 1)
        assert await locks.lock("a").try_acquire() is None
        await stay.end()
        await waiter.begun()
        assert await locks.revoke("a", token=waiter.token, reason="hangs")
        await revoked(waiter)
    await nothing_left(bench)
