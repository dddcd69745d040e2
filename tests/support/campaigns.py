"""
How far the tests search for faults: a short way in every run, and all the way with ``pytest --campaigns``.

A campaign repeats one test with thousands of histories, examples or faults. Its short version finds what is broken
outright, and runs in CI; what is rare shows in the long version: ``pytest --campaigns -m campaign``.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

_FULL = "FENCING_TEST_CAMPAIGNS"


def choose(*, full: bool) -> None:
    """Say how long all campaigns are, before pytest imports the test modules; child processes are told, too."""
    os.environ[_FULL] = "full" if full else ""


def amount(full: T, *, short: T) -> T:
    """How many examples, histories or seconds this run is for, or which ones."""
    return full if os.environ.get(_FULL) else short
