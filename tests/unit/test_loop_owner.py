"""What one loop of one process has opened, neither another loop nor a forked child may use."""

import asyncio
import ctypes
import os
from functools import partial

import pytest

from fencing_sdk._values import forks
from fencing_sdk._values.loop_owner import ForkDetector, LoopOwner


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch):
    """What a fork changes in the child."""
    return lambda: monkeypatch.setattr(forks, "here", partial(int, forks.here() + 1))


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


@pytest.mark.parametrize("mark", [forks._wiped_by_fork, forks._ByProcessId])
def test_a_child_that_was_forked_in_c_has_a_number_of_its_own(mark, monkeypatch: pytest.MonkeyPatch):
    """Such a fork runs no hook of Python."""
    calls = []
    monkeypatch.setattr(forks, "_mark", mark())
    monkeypatch.setattr(forks, "_calls", [lambda: calls.append(1)])
    forks._mark[0] = parent = forks._number
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        os._exit(0 if forks.here() == forks.here() == parent + 1 and calls == [1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (forks.here(), calls) == (parent, [])


def test_a_fork_is_told_once(fork):
    detector = ForkDetector()
    assert not detector.forked()
    fork()
    assert [detector.forked(), detector.forked()] == [True, False]
