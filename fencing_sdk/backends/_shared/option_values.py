"""Values of a backend's options. In the query of a URL they are texts, and one may be a password in the wrong place."""

from __future__ import annotations

import math

from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["read_hybrid", "read_seconds", "read_switch"]

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_THIRTY_YEARS = 1e9


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
    Return seconds above 0.

    Raises:
        ConfigurationError: *value* is no such number, or more than thirty years.
    """
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < _THIRTY_YEARS:
        msg = f"{parameter} must be a number of seconds above 0"
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
