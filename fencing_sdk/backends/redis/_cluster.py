"""
Which server of a Redis Cluster has which slot.

A map is a hint: slots move and masters fail over, and a server that is asked for a slot that it
has not says where to go. So the map is only read anew, from any node that answers, never waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ClusterDownError, ResponseError

from fencing_sdk.backends.redis._dial import BACKEND, Dialer, Server, ServerDialer, is_unknown_to_server
from fencing_sdk.backends.redis._race import first
from fencing_sdk.errors import BackendRefusedError

__all__ = ["SlotMap", "slot_of"]

SLOTS = 16384

_NO_CLUSTER = "the server is not part of a cluster; write redis://host:6379 for a single one"

_BY_CLUSTER = "where the cluster says that a node is"

Address = tuple[str, int]
Remap = Callable[[Address], Address]


def slot_of(key: bytes) -> int:
    """Find the slot of *key*: that of its part in braces, if it has one."""
    return key_slot(key)


class SlotMap:
    """
    The slots of one cluster. All its nodes share one login and one way to connect.

    Args:
        server: How to connect to any node; its host does not matter.

        seeds: Host and port of nodes to ask first; one that answers is enough.

        remap: From the address that the cluster tells to the one that can be reached from here.
    """

    def __init__(self, server: Server, *, seeds: Sequence[Address], remap: Remap | None = None) -> None:
        self._server = server
        self._seeds = tuple(seeds)
        self._remap = remap
        self._host = self._seeds[0][0]  # whom a node means that tells no host of its own
        self._masters: list[str] = [""] * SLOTS
        self._nodes: tuple[Address, ...] = ()

    async def refresh(self) -> None:
        """
        Read the map anew, from the first node that answers.

        Raises:
            Exception: what the last of the nodes failed with, if none has answered.
        """
        seeds = set(self._seeds)
        others = [node for node in self._nodes if node not in seeds]
        asked = [*random.sample(self._seeds, len(seeds)), *random.sample(others, len(others))]
        host, rows = await first([_Question(self._server, self._reachable(node), node[0]) for node in asked])
        self._read(host, rows)

    def _read(self, host: str, rows: Sequence[Sequence[Any]]) -> None:
        masters = [""] * SLOTS
        nodes: set[Address] = set()
        for start, end, master, *replicas in rows:
            owner, *others = (_address(node, host) for node in (master, *replicas))
            nodes.update(node for node in (owner, *others) if node is not None)
            if owner is not None:
                masters[start : end + 1] = [_joined(owner)] * (end + 1 - start)
        self._host, self._masters, self._nodes = host, masters, tuple(nodes)

    def address(self, slot: int) -> str:
        """
        Tell the ``host:port`` of the master that has *slot*, as far as this map knows.

        Raises:
            ClusterDownError: nobody has it, or the map was never read.
        """
        address = self._masters[slot]
        if not address:
            msg = "Hash slot not served"
            raise ClusterDownError(msg)
        return address

    def masters(self) -> frozenset[str]:
        """Tell the ``host:port`` of everybody who has a slot."""
        return frozenset(filter(None, self._masters))

    def dialer(self, address: str) -> Dialer:
        """Make a dialer for the ``host:port`` that `address`, MOVED or ASK told."""
        host, _, port = address.rpartition(":")
        return ServerDialer(self._server.at(*self._reachable((host or self._host, int(port)))), source=_BY_CLUSTER)

    def _reachable(self, address: Address) -> Address:
        return address if self._remap is None else self._remap(address)


class _Question:
    """Asks one node for the map."""

    def __init__(self, server: Server, address: Address, host: str) -> None:
        self._server = server.at(*address)
        self._host = host

    async def __call__(self) -> tuple[str, Sequence[Sequence[Any]]]:
        try:
            rows = await self._server.ask("CLUSTER", "SLOTS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_CLUSTER) from error
        if not isinstance(rows, list) or not rows:
            msg = "The node knows no slots"
            raise ClusterDownError(msg)
        return self._host, rows


def _address(node: Sequence[Any], asked: str) -> Address | None:
    """Read a node of CLUSTER SLOTS: host, port, id and, since Redis 7, a list of what else it is called."""
    host = asked if not node[0] else node[0].decode()
    if host == "?":  # its hostname was asked for and it has none
        more = node[3] if len(node) > 3 else []  # noqa: PLR2004
        told = dict(zip(more[::2], more[1::2], strict=False)) if isinstance(more, list) else more
        host = told.get(b"ip", b"").decode()
    return (host, node[1]) if host else None


def _joined(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
