"""What is promised to tasks and to threads: each scenario runs in both worlds."""

from __future__ import annotations

import copy
import pickle

import pytest
from both_worlds import bare, in_both_worlds

from fencing_sdk import UsageError


@in_both_worlds
async def test_what_belongs_to_this_process_is_neither_copied_nor_pickled(locks):
    lock, rwlock = locks.lock("a"), locks.rwlock("c")
    async with lock as lease, locks.multilock("b") as held, locks.semaphore("d", permits=2) as permit:
        things = [locks, lock, rwlock, rwlock.reader, locks.multilock("a"), locks.semaphore("d", permits=2)]
        for thing in map(bare, [*things, locks.election("e"), lease, held, permit]):
            for twin in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(UsageError, match=f"^{type(thing).__name__} cannot be copied or pickled"):
                    twin(thing)
        lease.check()
        assert not await locks.lock("a").try_acquire()


@in_both_worlds
async def test_both_locks_of_a_read_write_lock_are_not_entered_at_once(locks):
    with pytest.raises(UsageError, match="enter 'a' as a reader or as the writer: (async )?with rwlock"):
        async with locks.rwlock("a"):
            pass
