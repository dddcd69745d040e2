"""The front door shows what the documentation promises, and nothing else."""

import dataclasses
import enum
import importlib
import inspect
from types import ModuleType

import pytest

import fencing_sdk
from fencing_sdk import abc, errors, sync
from fencing_sdk.events import Event

PROMISED = {
    "AcquireError",
    "AcquireTimeoutError",
    "AnyLease",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "FencingError",
    "Holder",
    "InvalidNameError",
    "Lease",
    "LeaseLostError",
    "Lock",
    "LockClient",
    "LockHeldError",
    "LossReason",
    "StaleTokenError",
    "Status",
    "Token",
    "UsageError",
    "Waiting",
    "connect",
    "current_lease",
    "current_token",
}
MORE_ERRORS = {"AcquireCancelledError", "NoLeaseError", "NotAcquiredReason", "UnsupportedError"}
"""What hardly any code catches, and a word of an event: in `fencing_sdk.errors` alone."""
EVENTS = {
    "Acquired",
    "Acquiring",
    "Event",
    "FenceRaised",
    "JobEnded",
    "JobOutcome",
    "Lost",
    "NotAcquired",
    "NotAcquiredReason",
    "Observer",
    "Released",
    "RenewalFailed",
    "RenewalLate",
    "Renewed",
    "StaleRejected",
}
OLD_LOCKS = {"KazooLock", "OldLock", "PythonRedisLock", "RedisPyLock", "RedissonLock", "ShedLockRow"}
RECIPES = OLD_LOCKS | {
    "Election",
    "ElectionStanding",
    "ElectionTerm",
    "HeldLocks",
    "MultiLock",
    "PermitLease",
    "Ran",
    "ReadWriteLock",
    "Semaphore",
    "Skipped",
    "beside",
    "holding",
}
ABC = {
    "LOCK",
    "READER",
    "WRITER",
    "Backend",
    "Busy",
    "Claim",
    "Grant",
    "Guard",
    "Holder",
    "Listing",
    "LossNotice",
    "Mode",
    "Permit",
    "PlaceInLine",
    "Renewal",
    "Revoked",
    "SupportsDiagnosis",
    "SupportsLine",
    "SupportsListing",
    "SupportsLossNotice",
    "SupportsOpen",
    "SupportsRevoking",
    "SupportsShares",
    "SupportsTransfer",
    "WaiterNotice",
    "Waiting",
}
ROOMS = {"": PROMISED, "events": EVENTS, "recipes": RECIPES}


def room(name: str) -> ModuleType:
    return importlib.import_module(f"fencing_sdk.{name}" if name else "fencing_sdk")


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("name", ROOMS)
def test_a_door_is_the_promised_list(name):
    assert set(room(name).__all__) == ROOMS[name]
    assert room(name).__all__ == sorted(room(name).__all__)


def test_the_doors_are_small():
    assert len(PROMISED) <= 30
    assert len(ABC) <= 28


def test_every_error_leaves_through_a_door():
    every = {name for name in errors.__all__ if name != "shown"}
    assert every - set(fencing_sdk.__all__) == MORE_ERRORS


@pytest.mark.parametrize("name", ["", "recipes"])
def test_nothing_leaks_beside_the_list(name):
    door = room(name)
    assert {each for each in public(door) if not inspect.ismodule(getattr(door, each))} == ROOMS[name]
    with pytest.raises(AttributeError, match=rf"module '{door.__name__}' has no attribute 'Mutex'"):
        door.Mutex  # noqa: B018


THINGS = {name: getattr(room(where), name) for where, names in ROOMS.items() for name in names}


def test_every_public_thing_is_documented():
    undocumented = []
    for name in THINGS.keys() - {"Observer"}:
        thing = THINGS[name]
        members = [thing] if not inspect.isclass(thing) else [thing, *_methods(thing)]
        undocumented += [f"{name}: {member}" for member in members if not inspect.getdoc(member)]
    assert not undocumented


def _methods(thing: type) -> list[object]:
    return [member for name, member in vars(thing).items() if not name.startswith("_") and callable(member)]


def test_the_contract_is_what_the_author_of_a_store_imports():
    assert set(abc.__all__) == ABC
    assert all(hasattr(abc, name) for name in ABC)


def test_the_version_is_the_one_of_the_package():
    from importlib.metadata import version

    assert fencing_sdk.__version__ == version("fencing-sdk")


SHOWN = {
    **{name: {"release", "renew", "take"} for name in OLD_LOCKS},
    "AnyLease": {
        "check",
        "headers",
        "held",
        "holder",
        "lost_reason",
        "label",
        "name",
        "owner",
        "remaining",
        "resource",
        "token",
        "ttl",
    },
    "Lock": {"acquire", "locked", "name", "try_acquire"},
    "HeldLocks": {"check", "get", "items", "keys", "tokens", "values"},
    "MultiLock": {"names"},
    "Ran": {"held_for", "token", "value"},
    "Skipped": {"name", "retry_after"},
    "Election": {"leader", "leading", "name", "resign", "standing"},
    "ElectionTerm": {"lease"},
    "ReadWriteLock": {"holders", "name", "reader", "writer"},
    "Semaphore": {"acquire", "holders", "locked", "name", "permits", "try_acquire"},
    "LockClient": {
        "aclose",
        "diagnose",
        "drain",
        "draining",
        "all_holders",
        "holders",
        "revoke",
        "status",
        "waiters",
        "draining_on",
        "elected",
        "election",
        "inspect",
        "job",
        "lock",
        "locking",
        "multilock",
        "rwlock",
        "semaphore",
    },
    "Holder": {"held_for", "id", "label", "mode", "name", "permit", "remaining", "token", "waiters"},
    "Status": {"draining", "leader_of", "least_remaining", "leases", "open", "since_answer"},
    "Token": public(int),
    "Waiting": {"id", "label", "mode", "waiting_for"},
}
SHOWN["Lease"] = SHOWN["AnyLease"] | {"release", "renew", "wait_lost"}
SHOWN["PermitLease"] = SHOWN["Lease"] | {"permit"}
"""What each class of the front door shows; events and errors show their fields, and what their bases show."""


SHOWN_TO_THREADS = {
    "Election": SHOWN["Election"],
    "ElectionTerm": SHOWN["ElectionTerm"] | {"over"},
    "HeldLocks": SHOWN["HeldLocks"],
    "Lease": SHOWN["Lease"] | {"on_lost"},
    "Lock": SHOWN["Lock"],
    "LockClient": SHOWN["LockClient"] - {"aclose", "diagnose"} | {"close", "run"},
    "MultiLock": SHOWN["MultiLock"],
    "PermitLease": SHOWN["Lease"] | {"on_lost", "permit"},
    "ReadWriteLock": SHOWN["ReadWriteLock"],
    "Semaphore": SHOWN["Semaphore"],
}


def test_the_door_for_threads_has_the_same_words():
    """The doors of tasks are two; a thread has one, and one error more: no event cancels the wait of a task."""
    assert set(sync.__all__) == PROMISED | RECIPES | {"AcquireCancelledError"}
    assert sync.__all__ == sorted(sync.__all__)
    of_tasks = THINGS | {"AcquireCancelledError": errors.AcquireCancelledError}
    own = {name: thing for name in sync.__all__ if (thing := getattr(sync, name)) is not of_tasks[name]}
    assert own.keys() == SHOWN_TO_THREADS.keys() | {"beside", "connect", "current_lease"}
    assert {name: public(own[name]) for name in SHOWN_TO_THREADS} == SHOWN_TO_THREADS
    assert inspect.signature(sync.connect).parameters == inspect.signature(fencing_sdk.connect).parameters


@pytest.mark.parametrize("name", sorted(name for name, thing in THINGS.items() if inspect.isclass(thing)))
def test_a_public_class_shows_what_is_promised_and_nothing_that_could_make_a_lock_unsafe(name):
    thing = THINGS[name]
    if name in SHOWN:
        assert public(thing) == SHOWN[name]
        return
    if issubclass(thing, Event):
        promised = {"as_dict", "kind", *(field.name for field in dataclasses.fields(thing))}
    elif issubclass(thing, BaseException):
        promised = set(dir(TimeoutError)) | set(dir(ValueError))  # their fields are set when they are raised
    else:
        assert issubclass(thing, enum.Enum)
        promised = set(thing.__members__) | set(dir(str)) | {"name", "value"}
    assert public(thing) <= promised
