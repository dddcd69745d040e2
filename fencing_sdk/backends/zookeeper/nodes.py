"""
Nodes of a line: one folder for each name, and in it one node for each ticket.

    <root>/<name, percent-encoded>/<mode>-<mark>-<session>-<number>
    /fencing/invoices%2F42/lock-9f8a01c2...-100001a2b3c0004-0000000007
    /fencing/catalog/reader-9f8a01c2...-100001a2b3c0004-0000000007
    /fencing/catalog/writer-9f8a01c2...-100001a2b3c0004-0000000008
    /fencing/gpu-pool/permit-5-9f8a01c2...-100001a2b3c0004-0000000009

The mark is a digest of the owner id, so that an owner finds its node again after a lost reply, and a client that reads
the node cannot act in its name. The session is the one that keeps the node alive. The numbers, given by ZooKeeper, are
the line, and the transaction that created the node is its token.

A lock or a writer holds as soon as its node is the first. Readers share a token and permits have numbers: these are
written into the folder's data when their turn has come, in one step for all ahead. Else a later one would be written,
and leave, before an earlier one is, which then got what the later one had. The folder's data also has the reasons of
operators for the latest tickets that they ended. It goes with the folder.

ZooKeeper counts the nodes of a folder up to 2147483647. From then on it gives that number again and again, and negative
ones between. Such a number shows no place: the transaction that created the node does. A node that replaces such a one
at its place has 2147483648 plus that transaction for its number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from urllib.parse import unquote

from kazoo.protocol.states import ZnodeStat as Stat

from fencing_sdk._values.claim import READER, Mode, Permit, mode_named, safe_segment
from fencing_sdk._values.token import TOKEN_LIMIT

_MARK = 32
_NODE = re.compile(
    r"(lock|writer|reader|permit-[1-9][0-9]{0,9})-([0-9a-f]{32})-([0-9a-f]{1,16})-(-?[0-9]{9,10}|[1-9][0-9]{10,18})"
)
_LAST_NUMBER = 2**31 - 1
"""The highest number that ZooKeeper gives, and the first that it gives more than once."""
_SESSIONS = 2**64
_REASONS = 16
"""Ends by operators that a folder remembers: holders learn of theirs within a heartbeat."""


@lru_cache(maxsize=1024)  # each verb asks
def mark_of(owner: str) -> str:
    """128 bits of the digest of an owner id; they begin with the public ``holder``."""
    return hashlib.sha256(owner.encode()).hexdigest()[:_MARK]


def parked_mark_of(owner: str) -> str:
    """The mark of a ticket that stays for a while after its owner has given it back."""
    return mark_of(f"-{owner}")


@dataclass(frozen=True, slots=True)
class LineNode:
    """The node of a ticket."""

    name: str
    mark: str
    session: int
    number: int
    """Place in the line. In a name that ZooKeeper made, from `_LAST_NUMBER` on and below 0, it is not that."""
    mode: Mode

    @property
    def holder(self) -> str:
        """The public digest of the owner."""
        return self.mark[:8]


@lru_cache(maxsize=8192)  # each look at a line reads all of its names
def _read(name: str) -> LineNode | None:
    """Read the name of a node; None: it is not that of a ticket."""
    match = _NODE.fullmatch(name)
    if match is None:
        return None
    word, _, permits = match[1].partition("-")
    mode = mode_named(word, int(permits) if permits else None)
    return LineNode(name, match[2], int(match[3], 16), int(match[4]), mode)


def without_place(names: Iterable[str]) -> list[str]:
    """Return the nodes of a folder whose number shows no place: the line needs to know what created them."""
    nodes = filter(None, map(_read, names))
    return [node.name for node in nodes if node.number == _LAST_NUMBER or node.number < 0]


def in_line(names: Collection[str], created: Mapping[str, int] = MappingProxyType({})) -> list[LineNode]:
    """
    Sort the nodes of a folder, first come, first served; nodes that are not those of tickets are left out.

    Args:
        names: Their names.

        created: For those `without_place`, the transaction that created each. One that has gone meanwhile is not here,
            and is left out.
    """
    nodes = [node for name in names if (node := _read(name)) is not None]
    if unplaced := set(without_place(names)):
        nodes = [
            replace(node, number=_LAST_NUMBER + 1 + created[node.name]) if node.name in unplaced else node
            for node in nodes
            if node.name not in unplaced or node.name in created
        ]
    return sorted(nodes, key=attrgetter("number"))


def holding(line: Iterable[LineNode]) -> list[LineNode]:
    """Return the nodes of the tickets that hold: see `fencing_sdk.abc.line`."""
    held: list[LineNode] = []
    for node in line:
        if held and (node.mode.word != held[0].mode.word or len(held) >= node.mode.width):
            break
        held.append(node)
    return held


FOLDER = None
"""The rival of the first waiter for a permit: any of those that hold may go."""


def rival_of(line: Sequence[LineNode], position: int, held: int) -> LineNode | None:
    """
    Return the node whose change may let the ticket at *position*, which waits, hold; `FOLDER` for each of them.

    A reader waits for the last ahead that is not a reader's, a lock or a writer for the last of all. So does a permit,
    unless it is the first that waits, or has room as soon as the last ahead that is no permit's has gone. A permit that
    begins to hold changes its node, if one waits behind it.

    Args:
        line: The line.

        position: Of the ticket.

        held: How many hold.
    """
    mode = line[position].mode
    if not mode.shared:
        return line[position - 1]
    other = next((at for at in range(position - 1, -1, -1) if line[at].mode.word != mode.word), None)
    if other is not None and position - other - 1 < mode.width:
        return line[other]
    return FOLDER if position == held else line[position - 1]


# What is written into a folder, and into a node.


@dataclass(frozen=True, slots=True)
class Record:
    """Data of a folder: those who hold, and those whose tickets were ended."""

    token: int = 0
    """The token of the readers that hold; see `last`."""
    last: int = -1
    """The number of the last reader that has this token, as all ahead of it have."""
    permits: Mapping[int, int] = field(default_factory=dict)
    """The permits of those who hold one, by the number of their nodes."""
    ended: Sequence[tuple[str, frozenset[str]]] = ()
    """Reasons of operators, each with the marks of the tickets that it ended; the latest at the end."""

    def with_turns(self, held: Sequence[LineNode], count: int, token: int) -> Record:
        """
        Write the turns of the first *count* of all that hold. Those behind them keep what they have.

        *token*: of readers, if none of those that hold has one.
        """
        if not held or not held[0].mode.shared:
            return self
        if held[0].mode == READER:
            begun, last = held[0].number <= self.last, held[count - 1].number
            return replace(
                self, token=self.token if begun else token, last=max(self.last, last) if begun else last, permits={}
            )
        permits = {node.number: self.permits[node.number] for node in held if node.number in self.permits}
        for node in held[:count]:
            if node.number not in permits:
                taken = set(permits.values())
                permits[node.number] = next(number for number in range(len(taken) + 1) if number not in taken)
        return replace(self, token=0, last=-1, permits=permits)

    def turn_of(self, node: LineNode, number: int) -> tuple[int | None, int | None]:
        """Return the token and the permit of a node that holds; no token: its turn is not written yet."""
        if not node.mode.shared:
            return number, None
        if node.mode == READER:
            return (self.token if node.number <= self.last else None), None
        permit = self.permits.get(node.number)
        return (None if permit is None else number), permit

    def reason_for(self, mark: str) -> str | None:
        """Return why an operator ended the ticket of this mark."""
        return next((reason for reason, marks in reversed(self.ended) if mark in marks), None)

    def with_end(self, reason: str, marks: Iterable[str]) -> Record:
        """Remember an operator's *reason*."""
        return replace(self, ended=(*self.ended, (reason, frozenset(marks)))[-_REASONS:])

    def without_reason(self, mark: str) -> Record:
        """Forget why a ticket was ended: its owner has drawn another one."""
        kept = [(reason, marks - {mark}) for reason, marks in self.ended]
        return replace(self, ended=tuple((reason, marks) for reason, marks in kept if marks))

    def written(self) -> bytes:
        """The data of the folder."""
        fields: dict[str, object] = {"token": self.token, "last": self.last} if self.token else {}
        if self.permits:
            fields["permits"] = [*self.permits.items()]
        if self.ended:
            fields["ended"] = [[reason, *sorted(marks)] for reason, marks in self.ended]
        return json.dumps(fields).encode() if fields else b""


NOTHING = Record()


def read_record(data: bytes) -> Record:
    """Read the data of a folder, which any client may have written."""
    if not data:
        return NOTHING
    fields = _fields(data)
    token, last = _number(fields.get("token")), _number(fields.get("last"))
    permits, ended = fields.get("permits"), fields.get("ended")
    pairs = [pair for pair in permits if isinstance(pair, list) and len(pair) == 2] if isinstance(permits, list) else []  # noqa: PLR2004
    texts = [each for each in ended if isinstance(each, list) and each] if isinstance(ended, list) else []
    return Record(
        token=token or 0,
        last=-1 if last is None or not token else last,
        permits={pair[0]: pair[1] for pair in pairs if _number(pair[0]) is not None and _number(pair[1]) is not None},
        ended=tuple((each[0], frozenset(each[1:])) for each in texts if all(isinstance(text, str) for text in each)),
    )


def written(ttl: float, label: str | None, number: int | None = None) -> bytes:
    """
    The data of a node.

    A node that replaces another one keeps the *number* of its ticket: the transaction that created the first.
    """
    fields = {"ttl": ttl, "label": label, "number": number}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a ticket that its node has."""

    number: int
    """The transaction that drew it, which is the token of a lock, a writer and a permit."""
    ttl: float
    label: str | None


def read_facts(data: bytes, stat: Stat) -> Facts:
    """Read a node; a number that it cannot have is not believed."""
    fields = _fields(data)
    number, ttl, label = _number(fields.get("number")), fields.get("ttl"), fields.get("label")
    return Facts(
        number if number is not None and number < stat.czxid else stat.czxid,
        float(ttl) if isinstance(ttl, int | float) and 0 < ttl < TOKEN_LIMIT else 0.0,
        label if isinstance(label, str) else None,
    )


def _fields(data: bytes) -> dict[str, object]:
    try:
        fields: object = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things are, below one root."""

    root: str

    def folder(self, name: str) -> str:
        """The folder of a name."""
        return f"{self.root}/{safe_segment(name)}"

    def node(self, name: str, node: LineNode) -> str:
        """The path of a node."""
        return f"{self.folder(name)}/{node.name}"

    def stem(self, name: str, mode: Mode, mark: str, session: int) -> str:
        """The path of a node to be, without the number that ZooKeeper gives it."""
        word = f"permit-{mode.of}" if isinstance(mode, Permit) else mode.word
        return f"{self.folder(name)}/{word}-{mark}-{session % _SESSIONS:x}-"

    def moved(self, name: str, node: LineNode, mark: str, session: int) -> str:
        """The path of *node* at its place in the line, when it has another mark or session."""
        return f"{self.stem(name, node.mode, mark, session)}{node.number:010d}"

    def name(self, folder: str) -> str | None:
        """The lock of a folder below the root; None for a node of another program."""
        name = unquote(folder)
        return name if safe_segment(name) == folder else None

    def parents(self) -> list[str]:
        """The root and what is above it, from the top."""
        parts = self.root.strip("/").split("/")
        return ["/" + "/".join(parts[: end + 1]) for end in range(len(parts))]


def is_of(node: LineNode, session: int) -> bool:
    """Return whether *session* keeps *node* alive."""
    return node.session == session % _SESSIONS


def node_at(path: str, born: int) -> LineNode:
    """Return the node of a *path*; *born* is the transaction that created it."""
    name = path.rpartition("/")[2]
    (node,) = in_line([name], {name: born})
    return node
