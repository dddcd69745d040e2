"""The private names of the package that tests of several rooms need: one that moves is changed here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencing_sdk._arguments import check_label
from fencing_sdk._client import on_clock
from fencing_sdk._lease import AnyLease, held_here, state_of
from fencing_sdk._lock import telling
from fencing_sdk._recording import Recorder
from fencing_sdk._values.claim import holder_of
from fencing_sdk._values.clock import BootClock, Clock, LoopClock, wall_micros
from fencing_sdk._values.reports import (
    LABEL_LIMIT,
    HolderFacts,
    facts_about_command,
    label_of,
    read_facts,
    say_detached,
    say_kept,
)
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends.memory import MemoryBackend

M = TypeVar("M", bound=MemoryBackend)

__all__ = [
    "CALL_LIMIT",
    "LABEL_LIMIT",
    "LAST_CALL",
    "THIS_PROCESS",
    "TOKEN_LIMIT",
    "AnyLease",
    "BootClock",
    "HolderFacts",
    "LoopClock",
    "Recorder",
    "check_label",
    "facts_about_command",
    "held_here",
    "holder_of",
    "label_of",
    "memory_on",
    "on_clock",
    "read_facts",
    "say_detached",
    "say_kept",
    "state_of",
    "telling",
    "wall_micros",
]

THIS_PROCESS = "fencing_sdk._lease_state._this_process"
"""The process id that a lease compares with its own; a fork changes it in the child."""

# Limits that a test sets to another value, by the name under which the package keeps them.

LAST_CALL = "fencing_sdk._engine.acquisition._LAST_CALL"
CALL_LIMIT = "fencing_sdk._engine.engine._CALL_LIMIT"


def memory_on(clock: Clock, kind: Callable[..., M] = MemoryBackend, **options: object) -> M:
    """Make a store in memory whose grants end by *clock*."""
    backend = kind(**options)
    backend._lines.clock = clock
    return backend
