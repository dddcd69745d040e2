"""
Recipes: what is made of locks, a module for each.

`semaphore` and `rwlock` need a backend that takes all modes, the others work with every backend. A recipe adds no
protection of its own. Its leases are those of a lock: a deadline, a token, one heartbeat. A recipe is
handed what makes a lock and never the client, so that it can be read and tested alone.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from fencing_sdk._lease import PermitLease
    from fencing_sdk.recipes.election import Election, ElectionStanding, ElectionTerm
    from fencing_sdk.recipes.jobs import Ran, Skipped
    from fencing_sdk.recipes.multilock import HeldLocks, MultiLock
    from fencing_sdk.recipes.old_locks import (
        KazooLock,
        OldLock,
        PythonRedisLock,
        RedisPyLock,
        RedissonLock,
        ShedLockRow,
        beside,
    )
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

_MODULES = {
    "_lease": ("PermitLease",),
    "recipes.election": ("Election", "ElectionStanding", "ElectionTerm"),
    "recipes.jobs": ("Ran", "Skipped"),
    "recipes.multilock": ("HeldLocks", "MultiLock"),
    "recipes.old_locks": (
        "KazooLock",
        "OldLock",
        "PythonRedisLock",
        "RedisPyLock",
        "RedissonLock",
        "ShedLockRow",
        "beside",
    ),
    "recipes.precondition": ("holding",),
    "recipes.shares": ("ReadWriteLock", "Semaphore"),
}
"""The names of each module, which is imported when one of them is first read: a program loads what it uses."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            found: object = getattr(importlib.import_module(f"fencing_sdk.{module}"), name)
            globals()[name] = found
            return found
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
