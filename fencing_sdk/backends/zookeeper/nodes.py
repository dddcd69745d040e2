"""
How a lock is written down: one folder for each name, and in it one node for the holder and one for each waiter.

    <root>/<name, percent-encoded>/<mark>-<session>-<number>
    /fencing/invoices%2F42/9f8a01c2...-100001a2b3c0004-0000000007

The mark is a digest of the owner id, so that an owner finds its node again after a lost reply, and
a client that reads the node cannot act in its name. The session is the one that keeps the node alive. The
numbers, given by ZooKeeper, are the line: the lowest one holds the lock.

The folder's own data is empty until an operator takes the lock away. Then it has notes for the last holders that
lost it so: their marks, and the reasons. It goes with the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from fencing_sdk._values.claim import TOKEN_LIMIT, Claim, Holder
from fencing_sdk._values.names import safe_segment
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import Stat

__all__ = [
    "LineNode",
    "Paths",
    "in_line",
    "is_of",
    "mark_of",
    "noted",
    "read_holder",
    "read_notes",
    "read_token",
    "rewritten",
    "written",
]

_MARK = 32
_NODE = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,16})-(-?[0-9]{9,10})")
_NUMBERS = 2**32
_SESSIONS = 2**64
_NOTES = 16
"""Notes that a folder keeps: of holders that are told within a heartbeat."""


def mark_of(owner: str) -> str:
    """128 bits of the digest of an owner id; they begin with the public ``holder``."""
    return hashlib.sha256(owner.encode()).hexdigest()[:_MARK]


@dataclass(frozen=True, slots=True)
class LineNode:
    """The node of a holder or a waiter."""

    name: str
    mark: str
    session: int
    number: int


def in_line(names: Iterable[str]) -> list[LineNode]:
    """
    Sort the nodes of a folder, first come, first served; other nodes are left out.

    The numbers are signed, 32 bits wide, and wrap round. So they are compared like sequence
    numbers (RFC 1982), which is right as long as no two in one line are 2**31 apart.
    """
    nodes = [
        LineNode(match[0], match[1], int(match[2], 16), int(match[3]))
        for name in names
        if (match := _NODE.fullmatch(name)) is not None
    ]
    if nodes:
        base = nodes[0].number - _NUMBERS // 2
        nodes.sort(key=lambda node: (node.number - base) % _NUMBERS)
    return nodes


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things are, below one root."""

    root: str

    def folder(self, name: str) -> str:
        """The folder of a lock."""
        return f"{self.root}/{safe_segment(name)}"

    def node(self, name: str, node: LineNode) -> str:
        """The path of a node."""
        return f"{self.folder(name)}/{node.name}"

    def stem(self, claim: Claim, session: int) -> str:
        """The path of a node to be, without the number that ZooKeeper gives it."""
        return f"{self.folder(claim.name)}/{mark_of(claim.owner)}-{session % _SESSIONS:x}-"

    def moved(self, claim: Claim, node: LineNode, session: int) -> str:
        """The path of *node* at its place in the line, when another session keeps it alive."""
        return f"{self.stem(claim, session)}{node.number:010d}"

    def name(self, folder: str) -> str | None:
        """The lock of a folder below the root; None for a node of another program."""
        name = unquote(folder)
        return name if safe_segment(name) == folder else None

    def parents(self) -> list[str]:
        """The root and what is above it, from the top."""
        parts = self.root.strip("/").split("/")
        return ["/" + "/".join(parts[: end + 1]) for end in range(len(parts))]


def is_of(node: LineNode, session: int) -> bool:
    """Whether *session* keeps *node* alive."""
    return node.session == session % _SESSIONS


def written(claim: Claim) -> bytes:
    """The data of a node."""
    fields = {"ttl": claim.ttl, "metadata": claim.metadata}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def rewritten(data: bytes, claim: Claim, token: int) -> bytes:
    """
    The data of a node that moves from one session to another.

    It keeps its token, which all others have from ZooKeeper: the number of the transaction that created them.
    """
    return json.dumps(_fields(data) | {"ttl": claim.ttl, "token": token}).encode()


def _fields(data: bytes) -> dict[str, object]:
    """Read the data of a node, which any client may have written."""
    try:
        fields: object = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else {}


def read_notes(data: bytes) -> dict[str, str]:
    """The notes in a folder: by the mark of a holder, why its grant was taken away."""
    notes = _fields(data).get("revoked")
    found = notes.items() if isinstance(notes, dict) else ()
    return {mark: reason for mark, reason in found if isinstance(reason, str)}


def noted(data: bytes, mark: str, reason: str) -> bytes:
    """The data of a folder with one more note."""
    notes = {**read_notes(data), mark: reason}
    return json.dumps(_fields(data) | {"revoked": dict(list(notes.items())[-_NOTES:])}).encode()


def read_token(data: bytes, stat: Stat) -> int:
    """The token of a node; one that it cannot have is not believed."""
    token = _fields(data).get("token")
    moved = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < stat.czxid
    return token if moved and isinstance(token, int) else stat.czxid


def read_holder(name: str, node: LineNode, data: bytes, stat: Stat, left: float | None) -> Holder:
    """What `inspect` shows; *left* are the seconds that remain, where they are known."""
    fields = _fields(data)
    ttl, metadata = fields.get("ttl"), fields.get("metadata")
    if left is None:
        left = float(ttl) if isinstance(ttl, int | float) and 0 < ttl < TOKEN_LIMIT else 0.0
    shown = metadata if isinstance(metadata, str) else None
    return Holder(name, read_token(data, stat), node.mark[:8], left, shown)
