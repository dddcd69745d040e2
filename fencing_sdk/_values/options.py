"""
The options of a backend. Its constructor declares them: their names, their types and their defaults.

The query of a URL has the same options as texts, so the constructor reads texts too, by the functions below. One of the
texts may be a password in the wrong place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from datetime import timedelta

from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["nearest", "option_names", "read_hybrid", "read_seconds", "read_switch"]

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_THIRTY_YEARS = 1e9


def option_names(backend: Callable[..., object], *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """Return the options of a *backend*: the keyword arguments of its class, *besides* those that are not options."""
    parameters = inspect.signature(backend).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in besides)


def nearest(name: str, known: Collection[str]) -> str:
    """
    Return a question for an error: which of the *known* names is meant by *name*, which is mistyped.

    It is empty if none is near. It never contains *name*, which may be a part of a password.
    """
    from difflib import get_close_matches  # noqa: PLC0415  (most programs have no such error)

    name = name.lower()
    # Each driver has one of these words for the same thing, with or without it before the names of the files.
    spellings = (name, name.replace("ssl", "tls"), name.replace("tls", "ssl"), name.removeprefix("ssl_"))
    found = [near for each in spellings for near in get_close_matches(each, known, n=1)]
    return f" (did you mean {found[0]}?)" if found else ""


def read_switch(parameter: str, value: object) -> bool:
    """
    Return whether an option is on.

    Raises:
        ConfigurationError: *value* is neither a bool nor one of the texts true, yes, 1, false, no, 0.
    """
    text = str(value).lower() if isinstance(value, str | bool) else ""
    if text not in _SWITCHES:
        msg = f"{parameter} must be True or False"
        raise ConfigurationError(msg)
    return _SWITCHES[text]


def read_seconds(parameter: str, value: object) -> float:
    """
    Return seconds above 0: a number, its text, or a timedelta.

    Raises:
        ConfigurationError: *value* is not a valid number, or more than thirty years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < _THIRTY_YEARS:
        msg = f"{parameter} must be a number of seconds above 0 and below 1e9"
        raise ConfigurationError(msg)
    return seconds


def read_hybrid(tokens: object) -> bool:
    """
    Return whether tokens are hybrid.

    Raises:
        ConfigurationError: *tokens* is neither ``"hybrid"`` nor ``"counter"``.
    """
    if not isinstance(tokens, str) or tokens not in {"hybrid", "counter"}:
        msg = f"tokens must be 'hybrid' or 'counter', got {shown(tokens)}"
        raise ConfigurationError(msg)
    return tokens == "hybrid"
