"""
The nodes of the stand-in's cluster: who leads what, and what a client sees of a node in trouble.

Locks and values belong to partitions, and each partition has a leader. Any node may be asked: one that does not lead
passes the request on. What was seen of a real cluster, and which call here does it:

`begin`         a start: connections are refused, then everything is answered with 101
`kill`          the leader's partitions are answered with 101 until another node leads
`stop`, `go_on` a node that says nothing; the others pass requests on to it, and those hang, or answer 101, until
                another node leads. When it goes on, it passes no request on any more: 101 for ever, but ready
`cut`, `join`   a node without the others: changes of what it led hang, but it goes on to say no by what it knew last,
                so to the holder of a lock which the majority has renewed. It never says yes
`stick`         a node that passes on no request for some partitions: 101 for ever, but ready
"""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kahuna_store import KahunaStore, Tables
from kahuna_wire import LOCK_CALLS, LOCKED, MUST_RETRY, Fields, any_answer, invalid

PARTITIONS = 8
_HANG = 0.7
"""How probable it is that a request which is passed on to a leader without an answer hangs, and is not answered 101."""


@dataclass(slots=True)
class Member:
    """One node."""

    up: bool = True
    """It accepts connections."""
    stopped: bool = False
    cut: bool = False
    settled_at: float = 0.0
    """Until then it answers everything with 101."""
    stuck: set[int] = field(default_factory=set)
    """Partitions for which it passes no request on."""
    led: set[int] = field(default_factory=set)
    """What it led when it was cut off, and still takes itself for the leader of."""
    known: Tables = field(default_factory=Tables)
    """What it knew then."""
    back: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has come back from a stop or a cut."""

    @property
    def reachable(self) -> bool:
        """Whether the other nodes hear of it."""
        return self.up and not (self.stopped or self.cut)


@dataclass(slots=True)
class Members:
    """All nodes, over the store that a majority agrees on."""

    store: KahunaStore
    nodes: list[Member]
    failover: tuple[float, float] = (0.0, 0.0)
    """The least and the most seconds until another node leads."""
    replication_factor: int = 0
    routes: list[str] = field(default_factory=list)
    """The nodes' endpoints, if answers are to tell the leader's, as newer servers do."""
    leaders: dict[int, int] = field(default_factory=dict)
    elected_at: dict[int, float] = field(default_factory=dict)
    _generation: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        for partition in range(PARTITIONS):
            self.leaders[partition] = partition % len(self.nodes)

    def reset(self) -> None:
        """All nodes are well, and were never in trouble."""
        for node in self.nodes:
            node.back.set()
        self.nodes = [Member() for _ in self.nodes]
        self.elected_at.clear()
        self.failover, self.replication_factor, self.routes = (0.0, 0.0), 0, []
        self.__post_init__()

    # What happens to nodes.

    def begin(self, number: int, settle: float) -> None:
        node = self.nodes[number] = Member()
        node.settled_at = _now() + settle

    def kill(self, number: int) -> None:
        self.nodes[number].up = False
        self._elect(number)

    def stop(self, number: int) -> None:
        self.nodes[number].stopped = True
        self.nodes[number].back.clear()
        self._elect(number)

    def go_on(self, number: int) -> None:
        node = self.nodes[number]
        node.stopped = False
        node.stuck = {partition for partition in self.leaders if self._leader(partition) != number}
        node.back.set()

    def cut(self, number: int) -> None:
        node = self.nodes[number]
        node.led = {partition for partition in self.leaders if self._leader(partition) == number}
        node.known = self.store.tables.copy()
        node.cut = True
        node.back.clear()
        self._elect(number)

    def join(self, number: int) -> None:
        node = self.nodes[number]
        node.cut = False
        node.led.clear()
        node.back.set()

    def stick(self, number: int, partitions: list[int] | None = None) -> None:
        node = self.nodes[number]
        node.stuck = {p for p in partitions or self.leaders if self._leader(p) != number}

    def _elect(self, lost: int) -> None:
        for partition, leader in self.leaders.items():
            if leader == lost:
                self.elected_at[partition] = _now() + random.uniform(*self.failover)

    def _leader(self, partition: int) -> int | None:
        """The node that leads, after an election if its time has come; None without a majority."""
        reachable = [number for number, node in enumerate(self.nodes) if node.reachable]
        if self.leaders[partition] in reachable:
            return self.leaders[partition]
        if len(reachable) * 2 <= len(self.nodes) or _now() < self.elected_at.get(partition, 0.0):
            return None
        self.leaders[partition] = random.choice(reachable)
        return self.leaders[partition]

    # What is asked of nodes.

    async def answer(self, number: int, call: str, fields: Fields) -> Fields:
        node, partition = self.nodes[number], partition_of(call, fields)
        if node.stopped:
            await node.back.wait()
            return any_answer(call, MUST_RETRY)
        if _now() < node.settled_at:
            return any_answer(call, MUST_RETRY)
        refusal = invalid(call, fields)
        if refusal is not None:
            return refusal
        if node.cut:
            return await self._alone(node, partition, call, fields)
        leader = self._leader(partition)
        if partition in node.stuck and leader != number:
            return any_answer(call, MUST_RETRY)
        if leader is None:
            return await self._without_leader(partition, call)
        answer = await self.store.answer(call, fields)
        if node.stopped or node.cut or not self.nodes[leader].reachable:  # meanwhile: carried out, perhaps unanswered
            return await self._without_leader(partition, call)
        return answer | self._route(partition, leader)

    async def _without_leader(self, partition: int, call: str) -> Fields:
        lost = self.nodes[self.leaders[partition]]
        if (lost.stopped or lost.cut) and random.random() < _HANG:
            await lost.back.wait()
        return any_answer(call, MUST_RETRY)

    async def _alone(self, node: Member, partition: int, call: str, fields: Fields) -> Fields:
        """What a node says without the others: a no by what it knew last, never a yes."""
        if partition in node.led:
            decision = node.known.decide(call, fields, self.store.now())
            claims = decision.answer["type"] == LOCKED and call == "try-lock"
            if decision.change is None and not claims:
                return decision.answer
        elif random.random() >= _HANG:
            return any_answer(call, MUST_RETRY)
        await node.back.wait()
        return any_answer(call, MUST_RETRY)

    def _route(self, partition: int, leader: int) -> Fields:
        if not self.routes:
            return {}
        heard = {"partitionId": partition, "endpoint": self.routes[leader], "provenance": "Leader"}
        return {"route": {**heard, "generation": next(self._generation)}}

    # What an operator asks for.

    def health(self, number: int) -> Fields:
        ready = _now() >= self.nodes[number].settled_at
        return {"ready": ready, "initialized": ready, "localRole": "Voter", "hostedPartitions": PARTITIONS}

    def placement(self, number: int) -> Fields:
        factor = self.replication_factor
        each = {"state": "Active", "generation": 1, "effectiveReplicationFactor": factor, "hostedLocally": True}
        return {
            "replicationFactor": factor,
            "rebalancerEnabled": bool(factor),
            "initialized": self.health(number)["initialized"],
            "localEndpoint": f"node{number}:2072",
            "hostedPartitionCount": PARTITIONS,
            "partitions": [{"partitionId": p + 1, **each, "replicas": []} for p in self.leaders],
        }


def partition_of(call: str, fields: Fields) -> int:
    """Where a lock or a key belongs."""
    name = fields.get("resource" if call in LOCK_CALLS else "key") or ""
    return zlib.crc32(name.encode()) % PARTITIONS


def _now() -> float:
    return asyncio.get_running_loop().time()
