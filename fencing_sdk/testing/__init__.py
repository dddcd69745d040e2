"""
Tools for tests: suites for backends and guards, faults, and a world on virtual time.

Each name is loaded on first use: only the suites need pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fencing_sdk._values.drivers import install
from fencing_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from fencing_sdk.testing._plugin_worlds import LeaseEnder, Pause, PauseAnywhere
    from fencing_sdk.testing._rows import WorldDatabase
    from fencing_sdk.testing.comparison import Comparison
    from fencing_sdk.testing.faults import FaultyBackend
    from fencing_sdk.testing.suites import BackendSuite, GuardSuite
    from fencing_sdk.testing.world import FencedStore, UnfencedStore, World, WorldClient

__all__ = [
    "BackendSuite",
    "Comparison",
    "FaultyBackend",
    "FencedStore",
    "GuardSuite",
    "LeaseEnder",
    "Pause",
    "PauseAnywhere",
    "UnfencedStore",
    "World",
    "WorldClient",
    "WorldDatabase",
]

_HOMES = {
    "BackendSuite": "suites",
    "Comparison": "comparison",
    "FaultyBackend": "faults",
    "FencedStore": "world",
    "GuardSuite": "suites",
    "LeaseEnder": "_plugin_worlds",
    "Pause": "_plugin_worlds",
    "PauseAnywhere": "_plugin_worlds",
    "UnfencedStore": "world",
    "World": "world",
    "WorldClient": "world",
    "WorldDatabase": "_rows",
}
"""Name -> the module of this package that it lives in. A new name also goes into ``__all__`` and above."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        msg = f"{name} needs pytest; run: {install('testing')}"
        raise ConfigurationError(msg) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
