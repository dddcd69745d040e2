"""A Redis Cluster whose slots a test can move, and whose nodes it can lose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import hiredis
from fault_proxy import FaultProxy
from local_ports import HOST
from patience import wait_until
from redis_replicas import info
from redis_server import RedisServer, Setting

SLOTS = 16384


class Cluster:
    """
    Masters that share the slots evenly, each with as many replicas as asked for; settings go to every node.

    A move of a slot has two steps: after `start_move`, keys that the old node does not have are answered with ASK;
    after `finish_move`, the old node answers MOVED. `heal` moves all slots back.
    """

    def __init__(
        self, *, masters: int = 3, replicas: int = 0, binary: str = "redis-server", **settings: Setting
    ) -> None:
        patience = 1500 if replicas else 3000  # of a node with another one that is slow, and may be replaced
        options: dict[str, Setting] = {
            "cluster_enabled": True,
            "cluster_node_timeout": patience,
            "repl_ping_replica_period": 1,  # a replica that has received nothing is not named to clients
            **settings,
        }
        self.nodes = [RedisServer(binary=binary, tls=None, **options) for _ in range(masters * (1 + replicas))]
        """The masters of the start, and then their replicas."""
        self._masters = masters
        self._ids: dict[str, RedisServer] = {}
        self._away: dict[int, RedisServer] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._ids = {node.ask("CLUSTER", "MYID"): node for node in self.nodes}
            self._found()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    @property
    def masters(self) -> list[RedisServer]:
        """The nodes that have slots now, in the order of the slots."""
        return list(dict.fromkeys(self.owner_of(slot) for slot in range(0, SLOTS, 64)))

    def slot_of(self, key: str) -> int:
        return int(self._witness().ask("CLUSTER", "KEYSLOT", key))

    def node_of(self, key: str) -> RedisServer:
        """The master that has the slot of *key*."""
        return self.owner_of(self.slot_of(key))

    def owner_of(self, slot: int) -> RedisServer:
        """The master that has *slot*."""
        for first, last, master, *_ in self._witness().ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self._ids[master[2]]
        raise AssertionError(f"nobody has slot {slot}")

    def other_than(self, node: RedisServer) -> RedisServer:
        """A master that is not *node*."""
        return next(each for each in self.masters if each is not node)

    # Slots on the move

    def start_move(self, slot: int, *, to: RedisServer) -> None:
        """Open *slot* on both sides, with its keys still where they are."""
        source = self.owner_of(slot)
        self._away.setdefault(slot, source)
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(to))

    def move_keys(self, slot: int, *, to: RedisServer) -> None:
        """Carry the keys of an open slot over."""
        source = self.owner_of(slot)
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", HOST, to.port, "", 0, 5000, "AUTH2", "bench", "bench", "KEYS", *keys)

    def finish_move(self, slot: int, *, to: RedisServer) -> None:
        """Carry the keys over and tell every node who has the slot now."""
        self.move_keys(slot, to=to)
        for node in sorted(self.masters, key=lambda node: node is not to):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", self._id(to))

    def move_slot(self, slot: int, *, to: RedisServer) -> None:
        """Move a slot and its keys from its node to another one."""
        self.start_move(slot, to=to)
        self.finish_move(slot, to=to)

    # Nodes that fail

    async def failover(self, lost: RedisServer) -> RedisServer:
        """
        Kill a master whose replica has all its data, and return that replica when it has its slots, and all know.

        The replica is told to take over. An election by the other masters takes seconds, and on a busy machine many.
        """
        replica, written = self._replica_of(lost), int(info(lost, "replication")["master_repl_offset"])
        await asyncio.to_thread(
            wait_until,
            lambda: int(info(replica, "replication")["slave_repl_offset"]) >= written,
            what="the replica has all data",
        )
        lost.kill()
        with suppress(hiredis.ReplyError):  # it is refused if the replica has been elected meanwhile
            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        await asyncio.to_thread(wait_until, lambda: lost not in self.masters and self._ok(), what="a new master")
        return replica

    def heal(self) -> None:
        """Bring every node back, and every slot to the node that had it first."""
        for node in self.nodes:
            if node.running:
                node.resume()
            else:
                node.start()
        self._wait_until_whole()
        for slot, home in list(self._away.items()):
            for node in self.masters:
                node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
            if self.owner_of(slot) is not home:
                self.move_slot(slot, to=home)
        self._away.clear()

    # Names for the nodes

    async def announce(self, proxies: Sequence[FaultProxy] | None) -> None:
        """Let clients be sent to *proxies*, one per node in their order; None ends that. Needs Redis 7 or Valkey."""
        ports = [0] * len(self.nodes) if proxies is None else [proxy.port for proxy in proxies]
        for node, port in zip(self.nodes, ports, strict=True):
            await node.command("CONFIG", "SET", "cluster-announce-port", port)
        expected = {port or node.port for node, port in zip(self.nodes, ports, strict=True)}
        await asyncio.to_thread(
            wait_until, lambda: all(self._ports(node) == expected for node in self.nodes), what="all know the proxies"
        )

    # The inside

    def _found(self) -> None:
        for index, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index < self._masters:
                share = range(SLOTS * index // self._masters, SLOTS * (index + 1) // self._masters)
                node.ask("CLUSTER", "ADDSLOTS", *share)
            for other in self.nodes[:index]:
                node.ask("CLUSTER", "MEET", HOST, other.port)
        wait_until(lambda: all(len(self._ports(node)) == len(self.nodes) for node in self.nodes), what="all have met")
        for index, node in enumerate(self.nodes[self._masters :]):
            node.ask("CLUSTER", "REPLICATE", self._id(self.nodes[index % self._masters]))
        self._wait_until_whole()

    def _wait_until_whole(self) -> None:
        wait_until(lambda: self._ok() and self._attached(), what="the cluster is whole")

    def _ok(self) -> bool:
        """Whether every living node says that the cluster is fine, and all name the same owners."""
        living = [node for node in self.nodes if node.running]
        fine = all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in living)
        return fine and len({self._layout(node) for node in living}) == 1

    def _replica_of(self, master: RedisServer) -> RedisServer:
        return next(node for node in self.nodes if node.ask("ROLE")[2] == master.port)

    def _layout(self, node: RedisServer) -> tuple[tuple[int, int, str], ...]:
        slots = node.ask("CLUSTER", "SLOTS")
        return tuple(sorted((first, last, master[2]) for first, last, master, *_ in slots))

    def _attached(self) -> bool:
        """Whether every replica has its master's data."""
        try:
            roles = [node.ask("ROLE") for node in self.nodes]
        except (OSError, hiredis.ReplyError):
            return False
        return all(role[0] == "master" or role[3] == "connected" for role in roles)

    def _ports(self, node: RedisServer) -> set[int]:
        """The ports of all nodes that *node* knows well."""
        lines = node.ask("CLUSTER", "NODES").splitlines()
        known = [line.split()[1] for line in lines if "handshake" not in line and "noaddr" not in line]
        return {int(address.split("@")[0].rsplit(":", 1)[1]) for address in known}

    def _witness(self) -> RedisServer:
        return next(node for node in self.nodes if node.running)

    def _id(self, node: RedisServer) -> str:
        return next(name for name, each in self._ids.items() if each is node)
