"""
The keys of a lock, all of them in one slot of a Redis Cluster.

    {fencing:invoices/42}:l    the lease: owner NUL token NUL, 'w' if it is a writer's, then '=' and metadata, if any
    {fencing:invoices/42}:t    the last token granted
    {fencing:invoices/42}:q    the line: the owners that wait, in the order of arrival
    {fencing:invoices/42}:w    the line: the last sign of life of each owner, and what a grant and a message need
    {fencing:invoices/42}:sq   the line of permits, readers and writers: as q
    {fencing:invoices/42}:sw   the last sign of life of each of them, and the message that wakes it
    {fencing:invoices/42}:e    permits and readers: the owners that hold, by the time at which they end
    {fencing:invoices/42}:h    permits and readers: the token, the permit and the metadata of each owner
    {fencing:invoices/42}:x    owner -> why its grant was revoked, for as long as that would have lasted
    {fencing:invoices/42}:n    never written; see `never_key`

A hash tag ends at the first closing brace, so braces in a name are percent-encoded. Otherwise two
names could have the same tag, or a tag could be empty.
"""

from __future__ import annotations

from fencing_sdk._values.names import check_name
from fencing_sdk.errors import ConfigurationError

DEFAULT_PREFIX = "fencing"
LEASE = ":l"
WRITES = "w"
"""What stands in a lease before the metadata if its owner is a writer."""
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
_GLOB = str.maketrans({char: f"\\{char}" for char in "\\*?[]"})
"""What has a meaning in the pattern of SCAN."""


def check_prefix(prefix: object) -> str:
    """
    Return *prefix* if the keys of locks can begin with it.

    Raises:
        ConfigurationError: it is not a name, or it has braces.
    """
    prefix = check_name(prefix, parameter="prefix")
    if "{" in prefix or "}" in prefix:
        msg = "prefix must have no braces: the backend sets its own hash tag around prefix and name"
        raise ConfigurationError(msg)
    return prefix


class RedisKeys:
    """The keys that begin with one prefix."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def tag(self, name: str) -> str:
        """The hash tag with which all keys of a lock begin, braces included."""
        if "{" not in name and "}" not in name and "%" not in name:  # translate() is slow, and mostly changes nothing
            return f"{{{self._prefix}:{name}}}"
        return f"{{{self._prefix}:{name.translate(_ESCAPED)}}}"

    def leases(self, prefix: str, *, ending: str = LEASE) -> str:
        """The pattern of SCAN for the leases of all locks whose name begins with *prefix*."""
        return f"{{{self._prefix}:{prefix.translate(_ESCAPED)}".translate(_GLOB) + "*}" + ending

    def name(self, lease: bytes, *, ending: str = LEASE) -> str | None:
        """The lock of a key that `leases` has found; None for a key of another program."""
        try:
            tag = lease.decode().removesuffix(ending)
        except UnicodeDecodeError:
            return None
        escaped = tag.removeprefix(f"{{{self._prefix}:").removesuffix("}")
        name = escaped.replace("%7B", "{").replace("%7D", "}").replace("%25", "%")
        return name if self.tag(name) == tag else None

    def wake_channel(self, client: str) -> str:
        """The channel on which one client receives the messages for its waiters, whichever locks they wait for."""
        return f"{{{self._prefix}}}:wake:{client}"


def lease_key(tag: str) -> str:
    """The key of the lease: the holder, its token and its metadata."""
    return f"{tag}{LEASE}"


def token_key(tag: str) -> str:
    """The key of the last token granted."""
    return f"{tag}:t"


def line_keys(tag: str) -> tuple[str, str]:
    """The keys of the line: the order of arrival, and the signs of life."""
    return f"{tag}:q", f"{tag}:w"


def share_keys(tag: str) -> tuple[str, str]:
    """The keys of shares: when each ends, and what it is."""
    return f"{tag}:e", f"{tag}:h"


def share_line_keys(tag: str) -> tuple[str, str]:
    """The keys of the line of shares: the order of arrival, and the signs of life."""
    return f"{tag}:sq", f"{tag}:sw"


def never_key(tag: str) -> str:
    """
    A key that never exists: a server of a cluster refuses a script with it as a whole while the slot moves.

    Otherwise the script would begin if all its other keys were there, and fail in its middle: such a server refuses
    every command for a key that it does not have, even if the script itself has just emptied it.
    """
    return f"{tag}:n"


def revoked_key(tag: str) -> str:
    """The key of the reasons for which grants were revoked."""
    return f"{tag}:x"
