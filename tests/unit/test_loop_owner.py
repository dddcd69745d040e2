"""What one loop of one process has opened, neither another loop nor a forked child may use."""

import asyncio

import pytest

from fencing_sdk._values import forks
from fencing_sdk._values.loop_owner import ForkDetector, LoopOwner


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch):
    """What a fork changes in the child."""
    return lambda: monkeypatch.setattr(forks, "count", forks.count + 1)


async def test_the_loop_that_made_an_object_owns_it():
    owner = LoopOwner()
    assert owner.is_current
    assert owner.in_this_process
    assert owner.loop is asyncio.get_running_loop()


def test_the_next_loop_does_not_own_it():
    async def make() -> LoopOwner:
        return LoopOwner()

    async def look(owner: LoopOwner) -> tuple[bool, bool]:
        return owner.is_current, owner.in_this_process

    assert asyncio.run(look(asyncio.run(make()))) == (False, True)


async def test_a_forked_child_does_not_own_it(fork):
    owner = LoopOwner()
    fork()
    assert not owner.is_current
    assert not owner.in_this_process


async def test_a_child_may_ask_without_a_loop_whether_it_may_close_what_it_inherited(fork):
    owner = LoopOwner()
    fork()
    assert await asyncio.to_thread(lambda: owner.in_this_process) is False


def test_a_fork_is_told_once(fork):
    detector = ForkDetector()
    assert not detector.forked()
    fork()
    assert [detector.forked(), detector.forked()] == [True, False]
