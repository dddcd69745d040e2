"""`fencing init` founds a quorum of Redis servers once, and lets a node vote again that has lost its data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from command_line import Fencing
from redis_quorum import Quorum

from fencing_sdk import connect
from fencing_sdk.errors import BackendRefusedError

pytest_plugins = ["redis_fixtures"]


@pytest.fixture
def quorum(redis_binary: str) -> Iterator[Quorum]:
    with Quorum(3, binary=redis_binary, appendonly=True) as made:
        yield made


async def token(url: str) -> int:
    async with connect(url) as locks, locks.lock("a") as lease:
        return lease.token


async def test_a_quorum_is_founded_once(fencing: Fencing, quorum: Quorum):
    with pytest.raises(BackendRefusedError, match="fencing init"):
        await token(quorum.url)
    for said in ("the quorum of 3 nodes is founded", "nothing to do: all 3 nodes remember the epoch"):
        done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", f"fencing: {said}\n")
    assert await token(quorum.url) < await token(quorum.url)


async def test_a_node_that_has_lost_its_data_is_admitted_again(fencing: Fencing, quorum: Quorum):
    await quorum.found()
    before = await token(quorum.url)
    quorum.nodes[1].ask("FLUSHALL")
    done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
    assert (done.returncode, done.stderr) == (0, "fencing: 1 of 3 nodes had lost their memory, and vote again\n")
    quorum.nodes[0].kill()
    assert await token(quorum.url) > before


async def test_nothing_is_founded_while_a_node_is_away(fencing: Fencing, quorum: Quorum):
    quorum.nodes[2].kill()
    done = await asyncio.to_thread(fencing, "init", "--url", quorum.url)
    assert done.returncode == 69
    assert done.stderr.startswith("fencing: nothing was founded: ")
    assert str(quorum.nodes[2].port) in done.stderr
