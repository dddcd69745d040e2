"""
The requests that ZooKeeper takes, in the driver's words: requests, the record about a node, and the access to it.

One kind of request has no public name in kazoo, and is made up here: creating a container.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Create2,
    Delete,
    Exists,
    GetChildren2,
    GetData,
    SetData,
    Sync,
    Transaction,
)
from kazoo.protocol.states import EventType
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

__all__ = [
    "ALL_CLIENTS",
    "CREATOR",
    "BadVersionError",
    "NoNodeError",
    "NodeExistsError",
    "Stat",
    "UnimplementedError",
    "children",
    "create_container",
    "create_in_line",
    "create_persistent",
    "delete",
    "delete_with_note",
    "exists",
    "get",
    "is_acl",
    "is_deletion",
    "replace",
    "set_data",
    "set_if_there",
    "sync",
]

ALL_CLIENTS: Sequence[object] = tuple(OPEN_ACL_UNSAFE)
CREATOR: Sequence[object] = tuple(CREATOR_ALL_ACL)

_EPHEMERAL = 1
_SEQUENTIAL = 2
_CONTAINER = 4


class Stat(Protocol):
    """What is read of ZooKeeper's record about a node."""

    @property
    def czxid(self) -> int:
        """The transaction that created the node."""
        ...

    @property
    def ctime(self) -> int:
        """When the node was created, by the leader's clock: milliseconds since 1970."""
        ...

    @property
    def dataLength(self) -> int:  # noqa: N802  (the driver's word)
        """The bytes of its data."""
        ...

    @property
    def version(self) -> int:
        """How often the data was set."""
        ...

    @property
    def ephemeralOwner(self) -> int:  # noqa: N802  (the driver's word)
        """The session that keeps the node alive."""
        ...


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """A node that the server removes some time after its last child has gone. kazoo has no method for it."""

    type = 19


def create_in_line(path: str, data: bytes, acl: Sequence[object]) -> object:
    """An ephemeral node with the next number of its folder at the end of *path*; answers path and `Stat`."""
    return Create2(path, data, acl, _EPHEMERAL | _SEQUENTIAL)


def create_container(path: str, acl: Sequence[object]) -> object:
    """A node that the server removes some time after its last child has gone."""
    return _CreateContainer(path, b"", acl, _CONTAINER)


def create_persistent(path: str, acl: Sequence[object]) -> object:
    """A node that stays."""
    return Create2(path, b"", acl, 0)


def replace(old: str, new: str, data: bytes, acl: Sequence[object], *also: object) -> object:
    """
    Delete one node and create an ephemeral one, both or neither; answers a list that holds no error if both.

    *also* are requests that are carried out in the same step.
    """
    return Transaction([Delete(old, -1), Create(new, data, acl, _EPHEMERAL), *also])


def set_data(path: str, data: bytes, version: int) -> object:
    """Set the data of a node, if that has this *version*."""
    return SetData(path, data, version)


def set_if_there(path: str, data: bytes, version: int, there: str) -> object:
    """
    Set the data of a node, if that has this *version* and the node *there* exists.

    Answers a list: the second entry is the `Stat` of the node, or the list holds errors.
    """
    return Transaction([CheckVersion(there, -1), SetData(path, data, version)])


def delete_with_note(nodes: Sequence[tuple[str, int]], folder: str, note: bytes, folder_version: int) -> object:
    """Delete *nodes* and set the data of another one: all, or nothing if a version has changed since it was read."""
    return Transaction([SetData(folder, note, folder_version), *(Delete(*node) for node in nodes)])


def delete(path: str) -> object:
    """Fails with `NoNodeError` if the node is not there."""
    return Delete(path, -1)


def sync(path: str) -> object:
    """Answered by way of the leader, so that no later request gets an older answer."""
    return Sync(path)


def exists(path: str) -> object:
    """Answers a `Stat` or None."""
    return Exists(path, None)


def children(path: str, watch: Callable[[object], None] | None = None) -> object:
    """
    Answers the names of the nodes in a folder, and the `Stat` of the folder.

    *watch* is called once, as for `get`, when one comes or goes.
    """
    return GetChildren2(path, watch)


def get(path: str, watch: Callable[[object], None] | None = None) -> object:
    """
    Answers the data and the `Stat`, or fails with `NoNodeError`.

    *watch* is called once, in the driver's thread, when the node goes or the connection breaks. A
    node that is not there is not watched: one that never comes would be watched for ever.
    """
    return GetData(path, watch)


def is_acl(entry: object) -> bool:
    """Return whether *entry* is an ACL of kazoo."""
    return isinstance(entry, ACL)


def is_deletion(event: object) -> bool:
    """Return whether a watch was called because its node has gone, and not because the connection has."""
    return bool(getattr(event, "type", None) == EventType.DELETED)
