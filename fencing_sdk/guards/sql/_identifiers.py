"""Checks and quotes the names of tables and columns, so that the database never reads a part of them as SQL."""

from __future__ import annotations

import re

from fencing_sdk.errors import ConfigurationError, shown

SQLITE = "sqlite"
POSTGRESQL = "postgresql"
"""SQLAlchemy's names of the dialects."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_PLAIN = re.compile(_NAME, re.ASCII)
_WITH_SCHEMA = re.compile(rf"{_NAME}(\.{_NAME})?", re.ASCII)


def check_identifier(name: object, *, parameter: str, schema: bool = False) -> str:
    """
    Return *name* if it can name a table or a column. With *schema*, it may be ``schema.name``.

    Raises:
        ConfigurationError: it would need escaping, or PostgreSQL would truncate it.
    """
    if not isinstance(name, str) or not (_WITH_SCHEMA if schema else _PLAIN).fullmatch(name):
        forms = "'name' or 'schema.name'" if schema else "a name"
        msg = f"{parameter} must be {forms} of ASCII letters, digits and _, got {shown(name)}"
        raise ConfigurationError(msg)
    return name


def quoted(name: str) -> str:
    """Quote a *name* that was checked. Upper and lower case then count, and reserved words are allowed."""
    return ".".join(f'"{part}"' for part in name.split("."))
