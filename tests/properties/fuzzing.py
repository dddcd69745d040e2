"""How parsers are fuzzed: the same examples in every run, a limit on work, and texts that look almost right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from campaigns import amount
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])

SEED_SIZE = 100_000
"""Characters or bytes of the long inputs: more than any store, proxy or file of ours hands in as one piece."""
WORK = 400
"""Units of processor time for one long input. What is quadratic in `SEED_SIZE` needs thousands."""


def repeated(examples: int) -> settings:
    """Settings that give the same examples in every run; no health check is switched off."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def checked(examples: int) -> Callable[[Test], Test]:
    """Make a test a campaign of so many examples, of which every run has a tenth."""

    def decorate(test: Test) -> Test:
        return pytest.mark.campaign(repeated(amount(examples, short=examples // 10))(test))

    return decorate


def _unit_of_work() -> float:
    """Seconds of processor time that this machine needs now for what takes 10 ms on a usual one."""
    begin = time.process_time()
    sum(range(400_000))
    return time.process_time() - begin


@contextlib.contextmanager
def little_work() -> Iterator[None]:
    """Refuse code that works for long, in proportion to the machine, which may be slow or busy with something else."""
    unit = _unit_of_work()
    begin = time.process_time()
    yield
    spent = time.process_time() - begin
    assert spent < WORK * max(unit, _unit_of_work())


def pieces(*parts: str, most: int = 12) -> st.SearchStrategy[str]:
    """Texts made of *parts*, which mean something to the parser, and of anything else."""
    return st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), max_size=most).map("".join)


def long_ones(*parts: str) -> list[str]:
    """Each of *parts* again and again, up to `SEED_SIZE`."""
    return [part * (SEED_SIZE // len(part)) for part in parts]
