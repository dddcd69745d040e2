"""The options that are numbers. In a URL they are texts."""

from __future__ import annotations

from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["check_connections", "read_numbers"]

_MOST_CONNECTIONS = 1000
_KINDS: dict[str, type[float | int]] = {"connect_timeout": float, "connections": int}


def read_numbers(options: dict[str, object]) -> dict[str, object]:
    """
    Return *options* with the texts of numbers turned into numbers.

    Raises:
        ConfigurationError: a text is not a number.
    """
    texts = {name: text for name in _KINDS if isinstance(text := options.get(name), str)}
    return {**options, **{name: _read(name, text) for name, text in texts.items()}}


def _read(option: str, text: str) -> float:
    try:
        return _KINDS[option](text)
    except ValueError:
        pass
    msg = f"{option} must be a number, got {shown(text)}"
    raise ConfigurationError(msg)


def check_connections(connections: object) -> int:
    """
    Return how many connections may be open at once.

    Raises:
        ConfigurationError: *connections* is not a whole number in range.
    """
    if isinstance(connections, bool) or not isinstance(connections, int) or not 1 <= connections <= _MOST_CONNECTIONS:
        msg = f"connections must be a whole number from 1 to {_MOST_CONNECTIONS}, got {shown(connections)}"
        raise ConfigurationError(msg)
    return connections
