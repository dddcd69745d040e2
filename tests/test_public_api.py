"""The front door shows what the documentation promises, and nothing else."""

import dataclasses
import enum
import inspect

import pytest

import fencing_sdk
from fencing_sdk import abc, errors, sync

PROMISED = {
    "AcquireCancelledError",
    "AcquireError",
    "AcquireTimeoutError",
    "Acquired",
    "Acquiring",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "Election",
    "ElectionStanding",
    "ElectionTerm",
    "Event",
    "FenceRaised",
    "FencingError",
    "HeldLocks",
    "Holder",
    "InvalidNameError",
    "JobEnded",
    "JobOutcome",
    "Lease",
    "LeaseLostError",
    "Lock",
    "LockClient",
    "LockHeldError",
    "LossReason",
    "Lost",
    "MultiLock",
    "NoLeaseError",
    "NotAcquired",
    "NotAcquiredReason",
    "Observer",
    "PermitLease",
    "Ran",
    "ReadWriteLock",
    "Released",
    "RenewalFailed",
    "RenewalLate",
    "Renewed",
    "Semaphore",
    "Skipped",
    "StaleRejected",
    "StaleTokenError",
    "Status",
    "Token",
    "UnsupportedError",
    "UsageError",
    "connect",
    "current_lease",
    "current_token",
    "holding",
}


def test_the_front_door_is_the_promised_list():
    assert set(fencing_sdk.__all__) == PROMISED
    assert fencing_sdk.__all__ == sorted(fencing_sdk.__all__)


def test_every_error_leaves_through_the_front_door():
    public = {name for name in errors.__all__ if name != "shown"}
    assert public <= set(fencing_sdk.__all__)


def test_nothing_leaks_beside_the_list():
    public = {
        name
        for name in dir(fencing_sdk)
        if not name.startswith("_") and not inspect.ismodule(getattr(fencing_sdk, name))
    }
    assert public == PROMISED
    with pytest.raises(AttributeError, match="module 'fencing_sdk' has no attribute 'Mutex'"):
        fencing_sdk.Mutex  # noqa: B018


def test_every_public_thing_is_documented():
    undocumented = []
    for name in PROMISED - {"Observer"}:
        thing = getattr(fencing_sdk, name)
        members = [thing] if not inspect.isclass(thing) else [thing, *_methods(thing)]
        undocumented += [f"{name}: {member}" for member in members if not inspect.getdoc(member)]
    assert not undocumented


def _methods(thing: type) -> list[object]:
    return [member for name, member in vars(thing).items() if not name.startswith("_") and callable(member)]


def test_the_contracts_are_one_import_away():
    for name in abc.__all__:
        assert hasattr(abc, name)


def test_the_version_is_the_one_of_the_package():
    from importlib.metadata import version

    assert fencing_sdk.__version__ == version("fencing-sdk")


SHOWN = {
    "Lease": {
        "check",
        "headers",
        "held",
        "holder",
        "lost_reason",
        "metadata",
        "name",
        "owner",
        "release",
        "remaining",
        "renew",
        "resource",
        "token",
        "ttl",
        "wait_lost",
    },
    "Lock": {"acquire", "locked", "name", "try_acquire"},
    "HeldLocks": {"check", "get", "items", "keys", "tokens", "values"},
    "MultiLock": {"names"},
    "Ran": {"held_for", "token", "value"} | set(dir(dict)),
    "Skipped": {"name", "retry_after"} | set(dir(dict)),
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
    "Holder": {"held_for", "holder", "metadata", "mode", "name", "permit", "remaining", "token", "waiters"},
    "Status": {"draining", "leader_of", "least_remaining", "leases", "open", "since_answer"},
    "Token": set(dir(int)),
}
SHOWN["PermitLease"] = SHOWN["Lease"] | {"permit"}
"""What each class of the front door shows; events and errors show their fields, and what their bases show."""


SHOWN_TO_THREADS = {
    "AnyLease": SHOWN["Lease"] - {"release", "renew", "wait_lost"},
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
    classes = {name for name in sync.__all__ if inspect.isclass(getattr(sync, name))}
    assert {name: _shown(getattr(sync, name)) for name in classes} == SHOWN_TO_THREADS
    assert set(sync.__all__) - classes == {"connect", "current_lease", "current_token", "holding"}
    assert inspect.signature(sync.connect).parameters == inspect.signature(fencing_sdk.connect).parameters


def _shown(thing: type) -> set[str]:
    return {member for member in dir(thing) if not member.startswith("_")}


@pytest.mark.parametrize("name", sorted(name for name in PROMISED if inspect.isclass(getattr(fencing_sdk, name))))
def test_a_public_class_shows_what_is_promised_and_nothing_that_could_make_a_lock_unsafe(name):
    thing = getattr(fencing_sdk, name)
    shown = {member for member in dir(thing) if not member.startswith("_")}
    if issubclass(thing, fencing_sdk.Event):
        promised = {"as_dict", "kind", *(field.name for field in dataclasses.fields(thing))}
    elif issubclass(thing, BaseException):
        promised = set(dir(TimeoutError)) | set(dir(ValueError))  # their fields are set when they are raised
    elif issubclass(thing, enum.Enum):
        promised = set(thing.__members__) | set(dir(str)) | {"name", "value"}
    else:
        promised = SHOWN[name]
    assert shown <= promised
