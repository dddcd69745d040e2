"""Growth of tokens, and the age of a hybrid one."""

from __future__ import annotations

from collections.abc import Callable

from fencing_sdk._values.claim import READER, Mode
from fencing_sdk._values.clock import TICK
from fencing_sdk._values.url import read_hybrid
from fencing_sdk.abc.line import TokenSource

FIRST_HYBRID = 10**14
"""Hybrid tokens are above this moment of the year 2001, and no counter gets there."""


def token_source(tokens: object, wall_ticks: Callable[[], int]) -> TokenSource:
    """
    Choose how tokens grow.

    ``"hybrid"``: ``max(last + 1, ticks of 10 microseconds since 1970)``, which keeps growing when the counter
    is lost with its process or file. ``"counter"``: 1, 2, 3, which starts again then.
    """
    if read_hybrid(tokens):
        return lambda last: max(last + 1, wall_ticks())
    return lambda last: last + 1


def age_of(token: int, mode: Mode, micros: int) -> float | None:
    """
    Seconds since the grant. A hybrid *token* is the moment of its grant, in ticks of ten microseconds.

    None for a counter, and for a reader, which may have joined others with their token. *micros*: the time by the
    clock that the tokens come from.
    """
    return None if token < FIRST_HYBRID or mode == READER else max(0.0, (micros - token * TICK) / 1e6)
