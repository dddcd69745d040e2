"""The doors of the package: small, documented, nothing beside the list, and the same words for tasks and threads."""

import importlib
import inspect
from importlib.metadata import version
from types import ModuleType

import pytest

import fencing_sdk
from fencing_sdk import abc, errors, events, recipes, sync

MORE_ERRORS = {"AcquireCancelledError", "NoLeaseError", "NotAcquiredReason", "UnsupportedError"}
"""What hardly any code catches, and a word of an event: in `fencing_sdk.errors` alone."""
ONLY_FOR_TASKS = {"LockClient": {"aclose", "diagnose"}}


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_doors_are_small():
    """Which names they have stands in public_signatures.txt."""
    assert len(fencing_sdk.__all__) <= 30
    assert len(abc.__all__) <= 28


@pytest.mark.parametrize("door", [fencing_sdk, recipes, events, sync], ids=lambda door: door.__name__)
def test_a_door_is_a_sorted_list(door: ModuleType):
    assert door.__all__ == sorted(door.__all__)


@pytest.mark.parametrize("door", [fencing_sdk, recipes], ids=lambda door: door.__name__)
def test_nothing_leaks_beside_the_list(door: ModuleType):
    assert {name for name in public(door) if not inspect.ismodule(getattr(door, name))} == set(door.__all__)
    with pytest.raises(AttributeError, match=rf"module '{door.__name__}' has no attribute 'Mutex'"):
        door.Mutex  # noqa: B018


def test_every_error_leaves_through_a_door():
    assert set(errors.__all__) - {"shown"} - set(fencing_sdk.__all__) == MORE_ERRORS


@pytest.mark.parametrize("door", ["fencing_sdk", "fencing_sdk.recipes", "fencing_sdk.events", "fencing_sdk.abc"])
def test_every_public_thing_is_documented(door: str):
    module = importlib.import_module(door)
    undocumented = []
    for name in set(module.__all__) - {"Bell", "Observer", "Mode", "LOCK", "READER", "WRITER"}:
        thing = getattr(module, name)
        members = vars(thing) if inspect.isclass(thing) else {}
        own = [thing, *(each for member, each in members.items() if not member.startswith("_"))]
        own = [each for each in own if callable(each) and not getattr(each, "__name__", "_").startswith("_")]
        undocumented += [f"{name}: {each}" for each in own if not inspect.getdoc(each)]
    assert not undocumented


def test_the_version_is_the_one_of_the_package():
    assert fencing_sdk.__version__ == version("fencing-sdk")


def test_the_door_for_threads_has_the_same_words():
    """A thread has one door, and one error more: no event cancels the wait of a task."""
    assert set(sync.__all__) == {*fencing_sdk.__all__, *recipes.__all__, "AcquireCancelledError"}
    for name in sync.__all__:
        own = getattr(sync, name)
        of_tasks = getattr(fencing_sdk, name, None) or getattr(recipes, name, own)
        if inspect.isclass(own) and own is not of_tasks:
            assert public(of_tasks) - public(own) == ONLY_FOR_TASKS.get(name, set()), name
    assert inspect.signature(sync.connect).parameters == inspect.signature(fencing_sdk.connect).parameters
