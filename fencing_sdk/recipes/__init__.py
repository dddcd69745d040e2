"""
Recipes: what is made of locks, a module for each.

`semaphore` and `rwlock` need a backend that is a `SupportsShares`, the others work with every backend. A recipe adds no
protection of its own. Its leases are those of a lock: a deadline, a token, one heartbeat. A recipe is
handed what makes a lock and never the client, so that it can be read and tested alone.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from fencing_sdk._lease import PermitLease
    from fencing_sdk.recipes.election import Election, ElectionStanding, ElectionTerm
    from fencing_sdk.recipes.jobs import Ran, Skipped
    from fencing_sdk.recipes.mixed_fleet import OldLock, beside
    from fencing_sdk.recipes.multilock import HeldLocks, MultiLock
    from fencing_sdk.recipes.old_locks import KazooLock, PythonRedisLock, RedisPyLock, RedissonLock, ShedLockRow
    from fencing_sdk.recipes.precondition import holding
    from fencing_sdk.recipes.shares import ReadWriteLock, Semaphore

__all__ = [
    "Election",
    "ElectionStanding",
    "ElectionTerm",
    "HeldLocks",
    "KazooLock",
    "MultiLock",
    "OldLock",
    "PermitLease",
    "PythonRedisLock",
    "Ran",
    "ReadWriteLock",
    "RedisPyLock",
    "RedissonLock",
    "Semaphore",
    "ShedLockRow",
    "Skipped",
    "beside",
    "holding",
]

_HOMES = {
    "Election": "recipes.election",
    "ElectionStanding": "recipes.election",
    "ElectionTerm": "recipes.election",
    "HeldLocks": "recipes.multilock",
    "KazooLock": "recipes.old_locks",
    "MultiLock": "recipes.multilock",
    "OldLock": "recipes.mixed_fleet",
    "PermitLease": "_lease",
    "PythonRedisLock": "recipes.old_locks",
    "Ran": "recipes.jobs",
    "ReadWriteLock": "recipes.shares",
    "RedisPyLock": "recipes.old_locks",
    "RedissonLock": "recipes.old_locks",
    "Semaphore": "recipes.shares",
    "ShedLockRow": "recipes.old_locks",
    "Skipped": "recipes.jobs",
    "beside": "recipes.mixed_fleet",
    "holding": "recipes.precondition",
}
"""The module of each name, which is imported when the name is first read: a program loads the recipes that it uses."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = getattr(importlib.import_module(f"fencing_sdk.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
