"""
How a lock is written down: one folder for each name, and in it one node for the holder and one for each waiter.

    <root>/<name, percent-encoded>/<mark>-<session>-<number>
    /fencing/invoices%2F42/9f8a01c2...-100001a2b3c0004-0000000007
    /fencing/catalog/reader-9f8a01c2...-100001a2b3c0004-0000000007
    /fencing/catalog/writer-9f8a01c2...-100001a2b3c0004-0000000008
    /fencing/gpu-pool/permit-2-9f8a01c2...-100001a2b3c0004-0000000009

The mark is a digest of the owner id, so that an owner finds its node again after a lost reply, and
a client that reads the node cannot act in its name. The session is the one that keeps the node alive. The
numbers, given by ZooKeeper, are the line: `fencing_sdk.backends._shared.node_line` says who of it holds. The
number of a permit is in the name of its node: when it is granted, another node replaces it at the same place.

ZooKeeper counts the nodes of a folder up to 2147483647. From then on it gives that number again and again, and negative
ones between. Such a number shows no place: the transaction that created the node does. A node that replaces such a one
at its place has 2147483648 plus that transaction for its number.

The folder's own data is empty, or has the phase of readers, and notes for the last holders from whom an operator took
the lock away: their marks, and the reasons. It goes with the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from urllib.parse import unquote

from kazoo.protocol.states import ZnodeStat as Stat

from fencing_sdk._values.claim import LOCK, READER, WRITER, Claim, Holder, Mode, Permit, safe_segment
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.waiters import WakeUp
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession

_MARK = 32
_NODE = re.compile(
    r"(reader-|writer-|permit-waits-|permit-[0-9]{1,4}-|)([0-9a-f]{32})-([0-9a-f]{1,16})-(-?[0-9]{9,10}|[1-9][0-9]{10,18})"
)
_JOINING = {"reader": "reader-", "writer": "writer-", "permit": "permit-waits-"}
"""How the name of a node begins that joins the line."""
_LAST_NUMBER = 2**31 - 1
"""The highest number that ZooKeeper gives, and the first that it gives more than once."""
_SESSIONS = 2**64
_NOTES = 16
"""Notes that a folder keeps, for holders that learn of their loss within a heartbeat."""


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
    """Its place in the line. In a name that ZooKeeper made, from `_LAST_NUMBER` on and below 0, it is not that."""
    begin: str = ""
    """How its name begins: ``reader-``, ``permit-2-``; nothing for a lock."""

    @property
    def shared(self) -> str:
        """``reader`` or ``permit``; nothing for a lock and a writer."""
        return "" if self.begin == "writer-" else self.begin.partition("-")[0]

    @property
    def permit(self) -> int | None:
        """The number of a permit that was granted."""
        number = self.begin.removeprefix("permit-").removesuffix("-")
        return int(number) if number.isdigit() else None


class Line(list[LineNode]):
    """The nodes of a lock, first come, first served."""

    noted: bool = False
    """True if their folder has data: the phase of readers, or notes."""

    def position_of(self, claim: Claim) -> int | None:
        """Where the first node of a claim is."""
        mark = mark_of(claim.owner)
        return next((position for position, node in enumerate(self) if node.mark == mark), None)


@lru_cache(maxsize=8192)  # each look at a line reads all of its names
def _read(name: str) -> LineNode | None:
    """Read the name of a node; None: it is not one of a lock."""
    match = _NODE.fullmatch(name)
    return match and LineNode(name, match[2], int(match[3], 16), int(match[4]), match[1])


def without_place(names: Iterable[str]) -> list[str]:
    """Return the nodes of a folder whose number shows no place: the line needs to know what created them."""
    nodes = filter(None, map(_read, names))
    return [node.name for node in nodes if node.number == _LAST_NUMBER or node.number < 0]


def in_line(names: Collection[str], created: Mapping[str, int] = MappingProxyType({})) -> list[LineNode]:
    """
    Sort the nodes of a folder, first come, first served; nodes that are not those of a lock are left out.

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
        return self._stem(claim, session, _JOINING.get(claim.mode.word, ""))

    def _stem(self, claim: Claim, session: int, kind: str) -> str:
        return f"{self.folder(claim.name)}/{kind}{mark_of(claim.owner)}-{session % _SESSIONS:x}-"

    def moved(self, claim: Claim, node: LineNode, session: int) -> str:
        """The path of *node* at its place in the line, when another session keeps it alive."""
        return f"{self._stem(claim, session, node.begin)}{node.number:010d}"

    def granted(self, claim: Claim, node: LineNode, permit: int) -> str:
        """The path of *node* at its place in the line, when it is that of this *permit*."""
        return f"{self._stem(claim, node.session, f'permit-{permit}-')}{node.number:010d}"

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


def written(claim: Claim) -> bytes:
    """The data of a node."""
    of = claim.mode.of if isinstance(claim.mode, Permit) else None
    fields = {"ttl": claim.ttl, "label": claim.label, "of": of}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def rewritten(data: bytes, claim: Claim, token: int) -> bytes:
    """
    The data of a node that replaces another one at its place.

    It keeps that one's token, which all others have from ZooKeeper: the number of the transaction that created them.
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


def noted(data: bytes, marks: Iterable[str], reason: str) -> bytes:
    """The data of a folder with more notes."""
    notes = {**read_notes(data), **dict.fromkeys(marks, reason)}
    return json.dumps(_fields(data) | {"revoked": dict(list(notes.items())[-_NOTES:])}).encode()


def phase_of(data: bytes) -> int | None:
    """The phase in the data of a folder: the token of the readers that hold together."""
    phase = _fields(data).get("phase")
    return phase if isinstance(phase, int) and not isinstance(phase, bool) and phase > 0 else None


def with_phase(data: bytes, phase: int | None) -> bytes:
    """The data of a folder with another phase, or none."""
    fields = _fields(data)
    fields.pop("phase", None)
    if phase is not None:
        fields["phase"] = phase
    return json.dumps(fields).encode() if fields else b""


def read_token(data: bytes, stat: Stat) -> int:
    """The token of a node; one that it cannot have is not believed."""
    token = _fields(data).get("token")
    moved = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < stat.czxid
    return token if moved and isinstance(token, int) else stat.czxid


def read_holder(
    name: str,
    node: LineNode,
    data: bytes,
    stat: Stat,
    left: float | None,
    *,
    phase: int | None = None,
    waiters: int | None = None,
) -> Holder:
    """Describe a holder. *left* are the seconds that remain, where they are known; *phase* is a reader's token."""
    fields = _fields(data)
    ttl, label = fields.get("ttl"), fields.get("label")
    if left is None:
        left = float(ttl) if isinstance(ttl, int | float) and 0 < ttl < TOKEN_LIMIT else 0.0
    shown = label if isinstance(label, str) else None
    token = read_token(data, stat) if phase is None else phase
    mode = _mode(node, fields.get("of"))
    return Holder(name, token, node.mark[:8], left, shown, mode, node.permit, waiters=waiters)


def _mode(node: LineNode, of: object) -> Mode:
    if node.shared != "permit":
        return {"reader-": READER, "writer-": WRITER}.get(node.begin, LOCK)
    least = (node.permit or 0) + 1
    return Permit(of if isinstance(of, int) and not isinstance(of, bool) and of >= least else least)


Key = tuple[str, str]
"""Name and owner of a claim."""

_CLOCK = BootClock()


def key_of(claim: Claim) -> Key:
    """The key of a claim among the nodes."""
    return claim.name, claim.owner


@dataclass(eq=False, slots=True)
class OwnNode:
    """One node, and how long it counts."""

    claim: Claim
    session: ZooKeeperSession
    path: str
    token: int
    born: int
    """The transaction that created the node. A node of the same path may be another one."""
    permit: int | None = None
    """The number of the permit, where the grant is one."""
    ends_at: float | None = None
    """When the grant ends if it is not renewed. None while the node is a waiter."""
    over: bool = False
    """Released, expired or lost: never to be renewed again, even if the node is still there."""
    woken: WakeUp = field(default_factory=WakeUp)
    watched_on: int = 0
    """The connection of the session on which the node itself is watched; 0 when it is not."""
    watched: str = ""
    """The path of the node ahead that is watched."""
    timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> bool:
        """True if this is a grant that has not ended."""
        return not self.over and self.ends_at is not None and _CLOCK.now() < self.ends_at

    @property
    def surely_there(self) -> bool:
        """
        True if the node is watched, and no event has come.

        ZooKeeper sends the event of a watched node before it answers any later request on that connection.
        """
        return self.watched_on == self.session.connections

    def renew(self) -> None:
        """Let the grant last for a whole ttl from now on, unless the driver's thread has given the node up."""
        self.ends_at = _CLOCK.now() + self.claim.ttl
        if not self.session.ends.prolong(self.path, self.claim.ttl):
            self.finish()

    @property
    def left(self) -> float:
        """Seconds until the grant ends."""
        return 0.0 if self.ends_at is None else self.ends_at - _CLOCK.now()

    def finish(self) -> None:
        """End it: it is never renewed again."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class OwnNodes:
    """All nodes of one backend object, and the order of the calls about each of them."""

    def __init__(self) -> None:
        self._nodes: dict[Key, OwnNode] = {}
        self._locks: Counter[str] = Counter()
        """Nodes of locks, not of shares, by name."""
        self._turns: dict[Key, tuple[asyncio.Lock, list[None]]] = {}

    def get(self, key: Key) -> OwnNode | None:
        """The node of a claim."""
        return self._nodes.get(key)

    def put(self, own_node: OwnNode) -> None:
        """Enter *own_node*."""
        key = key_of(own_node.claim)
        if key not in self._nodes and own_node.claim.mode is LOCK:
            self._locks[own_node.claim.name] += 1
        self._nodes[key] = own_node

    def any_lock(self, name: str) -> bool:
        """Return whether a node of this object is in the line of a lock, so that no later one is granted before it."""
        return name in self._locks

    def drop(self, own_node: OwnNode) -> None:
        """Forget *own_node*, but not a later one of the same claim."""
        own_node.finish()
        if self._nodes.get(key_of(own_node.claim)) is own_node:
            del self._nodes[key_of(own_node.claim)]
            if own_node.claim.mode is LOCK:
                self._locks -= Counter((own_node.claim.name,))

    def of(self, session: ZooKeeperSession) -> list[OwnNode]:
        """The nodes that *session* keeps alive."""
        return [own_node for own_node in self._nodes.values() if own_node.session is session]

    def all(self) -> Iterable[OwnNode]:
        """All of them."""
        return list(self._nodes.values())

    def clear(self) -> None:
        """Forget all of them: in a forked child they are the parent's."""
        self._nodes.clear()
        self._locks.clear()
        self._turns.clear()

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """Let one call about a claim run at a time: a retry must not overlap with the first try."""
        lock, users = self._turns.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users and self._turns.get(key) == (lock, users):
                del self._turns[key]
