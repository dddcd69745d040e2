"""
MySQL and MariaDB, for the backend and the guard. Here: whether a server takes writes, and is the only one that does.

A row that is locked on one of several writers is free on the others. ``url`` reads URLs and options; ``driver`` is the
part of asyncmy that is used, with types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

VARIABLES = ("wsrep_on", "group_replication_single_primary_mode")
READ_ONLY = ("read_only", "super_read_only", "innodb_read_only", "transaction_read_only", "tx_read_only")
"""The settings of which each makes a server refuse writes. Aurora's readers have ``innodb_read_only`` alone."""

_LOOK_ALIKES = ("TiDB", "PlanetScale", "Vitess", "OceanBase")


def ask_for(*variables: str) -> str:
    """The statement whose rows `values_of` reads."""
    return f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({', '.join(map(repr, variables))})"


def values_of(rows: Iterable[Sequence[object]]) -> dict[str, str]:
    """The values in upper case, by their names. A server has only some of the variables."""
    return {_text(name): _text(value).upper() for name, value in rows}


def read_only(values: Mapping[str, str]) -> str | None:
    """Return which of the settings in `READ_ONLY` makes this server refuse writes; None if it takes them."""
    return next((name for name in READ_ONLY if values.get(name, "OFF") not in {"OFF", "0"}), None)


def look_alike(*texts: str) -> str | None:
    """Return which other database speaks MySQL's protocol here, by its version and comments; None for the real ones."""
    return next((name for name in _LOOK_ALIKES if any(name.upper() in text.upper() for text in texts)), None)


def several_writers(values: Mapping[str, str]) -> str | None:
    """Return why this server is one of several that take writes, and what to do; None if it writes alone."""
    if values.get("wsrep_on", "OFF") == "ON":
        return "the server is a node of Galera, where several nodes take writes; use a server that writes alone"
    if values.get("group_replication_single_primary_mode", "ON") == "OFF":
        return "group replication runs with several primaries; set group_replication_single_primary_mode = ON"
    return None


def _text(value: object) -> str:  # some drivers return bytes
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)
