"""
Where the masters are.

The master of a service: every dial asks its Sentinels, and does not keep the answer. An answer may be out of
date. So `ServerDialer` asks the server for its role as well, and refuses a replica.

The map of a cluster, which master has which slot, is a hint: slots move and masters fail over, and a server without
the slot names the one that has it. Any node can send the map.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio.sentinel import MasterNotFoundError
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, ResponseError

from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends.redis.connection.dial import (
    BACKEND,
    AddressSource,
    OpenConnection,
    ServerDialer,
    ServerSettings,
    first_answer,
    is_unknown_to_server,
)
from fencing_sdk.errors import BackendRefusedError

_NO_SENTINEL = "the server is not a Sentinel; the hosts of redis+sentinel:// are Sentinels, mostly on port 26379"
_FROM_SENTINELS = AddressSource(
    "the master's address by the Sentinels",
    "set 'sentinel resolve-hostnames yes' and 'sentinel announce-hostnames yes', and let them monitor a host name",
)
_DOWN = {b"s_down", b"o_down"}


@dataclass(frozen=True, slots=True, repr=False)
class SentinelService:
    """A service, and the Sentinels that watch it."""

    name: str
    sentinels: Sequence[ServerSettings]

    peers: int = 0
    """Other Sentinels that a Sentinel must know. The answer of one that knows fewer does not count."""

    host: str | None = None
    """The host of its servers, if the one that the Sentinels name cannot be reached from here."""

    async def master(self) -> tuple[str, int]:
        """
        Ask for the address of the master.

        Raises:
            MasterNotFoundError: no Sentinel that was reached knows a master that is up.
            UnreachableError: no Sentinel was reached.
            redis.exceptions.RedisError: a Sentinel refused the login.
        """
        return await first_answer([partial(self._ask, sentinel) for sentinel in self.sentinels])

    async def _ask(self, sentinel: ServerSettings) -> tuple[str, int]:
        try:
            masters = await sentinel.ask("SENTINEL", "MASTERS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_SENTINEL) from error
        assert isinstance(masters, list)
        for fields in masters:
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            if state[b"name"] == self.name.encode(errors="surrogateescape"):
                return self._address(state)
        msg = "The Sentinel does not watch this service"
        raise MasterNotFoundError(msg)

    def _address(self, state: dict[bytes, bytes]) -> tuple[str, int]:
        flags = set(state[b"flags"].split(b","))
        if b"master" not in flags or flags & _DOWN or int(state[b"num-other-sentinels"]) < self.peers:
            msg = "The Sentinel knows no master that is up"
            raise MasterNotFoundError(msg)
        return self.host or state[b"ip"].decode(), int(state[b"port"])


class SentinelDialer:
    """Opens connections to the master of a service."""

    def __init__(self, server: ServerSettings, service: SentinelService) -> None:
        self.server = server
        self.service = service

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        """See `fencing_sdk.backends.redis.connection.dial.RedisDialer.dial`."""
        server = self.server.at(*await self.service.master())
        return await ServerDialer(server, source=_FROM_SENTINELS).dial(protocol)


SLOTS = 16384

_NO_CLUSTER = "the server is not part of a cluster; write redis://host:6379 for a single one"

_FROM_CLUSTER = AddressSource(
    "a node's address by the cluster",
    "set cluster-announce-hostname on every node, and 'cluster-preferred-endpoint-type hostname'",
)

Address = tuple[str, int]
Remap = Callable[[Address], Address]


def slot_of(key: bytes) -> int:
    """The slot of *key*. If it has a part in braces, only that part counts."""
    return key_slot(key)


class SlotMap:
    """
    The slots of one cluster. All its nodes share one login and one way to connect.

    Args:
        server: How to connect to any node; its host is not used.

        seeds: Host and port of the nodes to ask first; one that answers is enough.

        remap: Translates an address that the cluster names to the one that this client reaches.
    """

    def __init__(self, server: ServerSettings, *, seeds: Sequence[Address], remap: Remap | None = None) -> None:
        self._server = server
        self._seeds = tuple(seeds)
        self._remap = remap
        self._host = self._seeds[0][0]  # of the node that sent the map: it may leave out its own host
        self._masters: list[str] = [""] * SLOTS
        self._nodes: tuple[Address, ...] = ()
        self.layout = ""
        """A digest of which master has which slots, once the map was read."""

    async def refresh(self) -> None:
        """
        Read the map again, from the first node that answers.

        Raises:
            Exception: no node has sent a map; see `first_answer`.
        """
        seeds = set(self._seeds)
        others = [node for node in self._nodes if node not in seeds]
        asked = [*JITTER.sample(self._seeds, len(seeds)), *JITTER.sample(others, len(others))]
        host, rows = await first_answer([partial(self._ask, node) for node in asked])
        self._read(host, rows)

    async def _ask(self, node: Address) -> tuple[str, Sequence[Sequence[Any]]]:
        """Ask one node for the map; return its host with the answer."""
        try:
            rows = await self._server.at(*self._reachable(node)).ask("CLUSTER", "SLOTS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_CLUSTER) from error
        if not isinstance(rows, list) or not rows:
            msg = "The node knows no slots"
            raise ClusterDownError(msg)
        return node[0], rows

    def _read(self, host: str, rows: Sequence[Sequence[Any]]) -> None:
        masters = [""] * SLOTS
        nodes: set[Address] = set()
        for start, end, master, *replicas in rows:
            owner, *others = (_address(node, host) for node in (master, *replicas))
            nodes.update(node for node in (owner, *others) if node is not None)
            if owner is not None:
                masters[start : end + 1] = [_joined(owner)] * (end + 1 - start)
        self._host, self._masters, self._nodes = host, masters, tuple(nodes)
        self.layout = hashlib.sha256("\n".join(masters).encode()).hexdigest()[:16]

    def address(self, slot: int) -> str:
        """
        The ``host:port`` of the master that has *slot*, according to the map.

        Raises:
            ClusterDownError: no master has it, or the map was never read.
        """
        address = self._masters[slot]
        if not address:
            msg = "Hash slot not served"
            raise ClusterDownError(msg)
        return address

    def servers(self) -> Mapping[str, ServerSettings]:
        """Every node that is known, masters and replicas, by ``host:port``; before the map was read, the seeds."""
        known = dict.fromkeys([*self._seeds, *self._nodes])
        return {_joined(node): self._server.at(*self._reachable(node)) for node in known}

    def masters(self) -> frozenset[str]:
        """The ``host:port`` of every master that has a slot."""
        return frozenset(filter(None, self._masters))

    def dialer(self, address: str) -> ServerDialer:
        """Make a dialer for a ``host:port`` of `address`, MOVED or ASK."""
        host, _, port = address.rpartition(":")
        return ServerDialer(self._server.at(*self._reachable((host or self._host, int(port)))), source=_FROM_CLUSTER)

    def _reachable(self, address: Address) -> Address:
        return address if self._remap is None else self._remap(address)


def _address(node: Sequence[Any], asked: str) -> Address | None:
    """Read a node of CLUSTER SLOTS: host, port, id and, since Redis 7, a list of its other names."""
    host = asked if not node[0] else node[0].decode()
    if host == "?":  # the cluster prefers hostnames, and this node has none
        more = node[3] if len(node) > 3 else []  # noqa: PLR2004
        names = dict(zip(more[::2], more[1::2], strict=False)) if isinstance(more, list) else more
        host = names.get(b"ip", b"").decode()
    return (host, node[1]) if host else None


def _joined(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
