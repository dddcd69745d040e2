"""
How a lock's name becomes keys, all of them in one slot of a Redis Cluster.

    {fencing:invoices/42}:l    the lease: owner NUL token NUL, then '=' and the metadata if there is any
    {fencing:invoices/42}:t    the last token granted
    {fencing:invoices/42}:q    the line: who waits, in the order of arrival
    {fencing:invoices/42}:w    the line: the last sign of life of each, and how it is woken

A hash tag ends at the first closing brace, so braces in a name are percent-encoded: otherwise two
names could share a tag, or a tag could be empty.
"""

from __future__ import annotations

from fencing_sdk._values.names import check_name
from fencing_sdk.errors import ConfigurationError

DEFAULT_PREFIX = "fencing"
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def check_prefix(prefix: object) -> str:
    """
    Return *prefix* if it can begin the keys of locks.

    Raises:
        ConfigurationError: it is not a name, or it has braces.
    """
    prefix = check_name(prefix, parameter="prefix")
    if "{" in prefix or "}" in prefix:
        msg = "prefix must have no braces: the backend sets its own hash tag around prefix and name"
        raise ConfigurationError(msg)
    return prefix


class Keys:
    """The keys of one prefix."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def tag(self, name: str) -> str:
        """The hash tag of a lock, braces included: what its keys begin with."""
        if "{" not in name and "}" not in name and "%" not in name:  # translating takes most of the time, for nothing
            return f"{{{self._prefix}:{name}}}"
        return f"{{{self._prefix}:{name.translate(_ESCAPED)}}}"

    def wake_channel(self, client: str) -> str:
        """The channel on which one client is woken, whatever lock it waits for."""
        return f"{{{self._prefix}}}:wake:{client}"


def lease_key(tag: str) -> str:
    """Who holds the lock."""
    return f"{tag}:l"


def token_key(tag: str) -> str:
    """The last token granted."""
    return f"{tag}:t"


def line_keys(tag: str) -> tuple[str, str]:
    """The order of the line, and its signs of life."""
    return f"{tag}:q", f"{tag}:w"
