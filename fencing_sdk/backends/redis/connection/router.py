"""
Choice of the server that runs a script.

`SingleMasterRouter`: one server, or the one that Sentinels call the master now. `ClusterRouter`: the slot of the
script's keys decides, by a map that a server of the cluster has sent. The map may be out of date. It is read again:

1. When a server replies MOVED. It names the server that has the slot now, and the call goes on there.
2. When a server cannot be reached, or the map names none for a slot: a replica may have become the master.

While a slot is moving, a server replies ASK for keys that have left it, and the call goes on at the server it names.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from redis.crc import key_slot
from redis.exceptions import ClusterDownError, ResponseError

from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.tasks import cancel_and_wait, retrieve, start_task
from fencing_sdk.backends.redis.connection.dial import (
    BACKEND,
    AddressSource,
    ServerDialer,
    ServerSettings,
    first_answer,
    is_unknown_to_server,
)
from fencing_sdk.backends.redis.connection.node import (
    CallOutcome,
    RedisNode,
    UnconfirmedError,
    cancellations,
    outcome_of,
)
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import BackendRefusedError

SLOTS = 16384

_NO_CLUSTER = "the server is not part of a cluster; write redis://host:6379 for a single one"

_FROM_CLUSTER = AddressSource(
    "a node's address by the cluster",
    "set cluster-announce-hostname on every node, and 'cluster-preferred-endpoint-type hostname'",
)

Address = tuple[str, int]
Remap = Callable[[Address], Address]


class SlotMap:
    """
    The slots of one cluster. All its nodes share one login and one way to connect.

    Of the *seeds*, which are asked first, one that answers is enough. *remap* translates an address that the cluster
    names to the one that this client reaches.
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
        """Read the map again, from the first node that answers. Raise as `first_answer` does if there is none."""
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
        """The ``host:port`` of the master that has *slot*, by the map. Raise ClusterDownError if there is none."""
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


MakeNode = Callable[[ServerDialer], RedisNode]

_REDIRECTIONS = {"MOVED", "ASK"}
_HOPS = 5
"""Servers that one call tries before it fails: slots move one at a time."""


class Masters(NamedTuple):
    """The servers that have the keys of locks."""

    nodes: Sequence[RedisNode]
    layout: str
    """Slots of each of them: a digest, or "" for a single master."""


class SingleMasterRouter:
    """Runs every script on one server."""

    def __init__(self, node: RedisNode) -> None:
        self._node = node
        self.run = node.run
        self.run_all = node.run_all
        self.aclose = node.aclose

    async def node(self, key: str) -> RedisNode:  # noqa: ARG002  (it has every key)
        """The server that has *key*."""
        return self._node

    def last_pipe(self, key: str) -> Pipe | None:  # noqa: ARG002  (it has every key)
        """The last connection that was opened to the server that has *key*; None if no such server is known."""
        return self._node.connection

    async def masters(self, *, anew: bool) -> Masters:  # noqa: ARG002  (there is no map)
        """Every server that has keys; *anew*: not by a map that was read before."""
        return Masters((self._node,), "")


class ClusterRouter:
    """Runs a script on the server that has the slot of its keys."""

    def __init__(self, slots: SlotMap, make_node: MakeNode) -> None:
        self._slots = slots
        self._make_node = make_node
        self._nodes: dict[str, RedisNode] = {}
        self._moved: dict[int, str] = {}  # slot -> address, from MOVED replies since the map was read
        self._refreshing: asyncio.Task[None] | None = None
        self._map_was_read = False

    async def node(self, key: str) -> RedisNode:
        """See `SingleMasterRouter.node`."""
        await self._ready()
        return self._node_of(key)

    def last_pipe(self, key: str) -> Pipe | None:
        """See `SingleMasterRouter.last_pipe`."""
        if not self._map_was_read:
            return None
        try:
            return self._node_of(key).connection
        except Exception:  # noqa: BLE001  (the full call raises what is wrong)
            return None

    async def run(self, call: ScriptCall) -> Reply:
        """Run one script on the server that has its keys."""
        await self._ready()
        node = self._node_of(call.keys[0])
        for _ in range(_HOPS):
            try:
                return await node.run(call)
            except ReplyError as error:
                if error.code not in _REDIRECTIONS:
                    raise
                address = error.words[2]
                node = self._node_at(address)
                if error.code == "ASK":
                    return await node.run_asking(call)
                self._moved[key_slot(call.keys[0].encode())] = address
                self._refresh_soon()
            except Exception as error:
                self._refresh_after(error)
                raise
        msg = "the slot moved again and again"
        raise PipeError(msg)

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[CallOutcome]:
        """
        Run many scripts, in one write for each server. Each call has its own outcome.

        When it is cancelled after some servers have answered, it returns their answers: at the limit of a call, some
        of them are better than none.
        """
        try:
            await self._ready()
        except Exception as error:  # noqa: BLE001  (each call fails with the driver's error)
            return [error] * len(calls)
        outcomes: list[CallOutcome] = [None] * len(calls)
        by_node: dict[RedisNode, list[int]] = {}
        for number, call in enumerate(calls):
            try:
                by_node.setdefault(self._node_of(call.keys[0]), []).append(number)
            except Exception as error:  # noqa: BLE001  (the calls for other slots go on)
                outcomes[number] = error
        work = {
            start_task(self._run_on(node, [calls[n] for n in numbers])): numbers for node, numbers in by_node.items()
        }
        try:
            await asyncio.wait(work) if work else None
        except asyncio.CancelledError:
            for task in work:
                task.cancel()
            if not any(task.done() for task in work):
                raise
        for task, numbers in work.items():
            answers = task.result() if task.done() else [PipeError("the server did not answer in time")] * len(numbers)
            for number, outcome in zip(numbers, answers, strict=True):
                outcomes[number] = outcome
        return outcomes

    async def _run_on(self, node: RedisNode, calls: Sequence[ScriptCall]) -> list[CallOutcome]:
        """Run the calls of one server, and again elsewhere those that it redirects."""
        outcomes = await node.run_all(calls)
        redirected: list[int] = []
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, ReplyError) and outcome.code in _REDIRECTIONS:
                redirected.append(number)
            elif isinstance(outcome, Exception):
                self._refresh_after(outcome)
        answers = await asyncio.gather(*(outcome_of(self.run(calls[number])) for number in redirected))
        for number, answer in zip(redirected, answers, strict=True):
            outcomes[number] = answer
        return outcomes

    async def masters(self, *, anew: bool) -> Masters:
        """See `SingleMasterRouter.masters`."""
        await self._ready()
        if anew:
            if self._refreshing is not None and not self._refreshing.done():  # it may be answered before this call
                await self._wait_for(self._refreshing)
            await self._wait_for(self._refresh_soon())
        return Masters([self._node_at(address) for address in sorted(self._slots.masters())], self._slots.layout)

    async def aclose(self) -> None:
        """Close every connection."""
        nodes, refreshing = tuple(self._nodes.values()), self._refreshing
        self._nodes.clear()
        self._moved.clear()
        self._refreshing = None
        self._map_was_read = False
        if refreshing is not None and refreshing.get_loop() is asyncio.get_running_loop():
            await cancel_and_wait(refreshing)
        await asyncio.gather(*(node.aclose() for node in nodes))

    def _refresh_after(self, error: Exception) -> None:
        """Read the map again after an *error* that no server has sent: a replica may have taken over."""
        if self._map_was_read and not isinstance(error, ReplyError | UnconfirmedError):  # else the next call reads it
            self._refresh_soon()

    def _node_of(self, key: str) -> RedisNode:
        slot = key_slot(key.encode())
        try:
            return self._node_at(self._moved.get(slot) or self._slots.address(slot))
        except Exception as error:
            self._refresh_after(error)
            raise

    def _node_at(self, address: str) -> RedisNode:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(self._slots.dialer(address))
        return node

    async def _ready(self) -> None:
        """Wait for the first map. A later one is read in the background."""
        if not self._map_was_read:
            await self._wait_for(self._refresh_soon())

    async def _wait_for(self, task: asyncio.Task[None]) -> None:
        before = cancellations()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and cancellations() == before:
                msg = "the backend was closed while it looked for the servers"
                raise PipeError(msg) from None
            raise

    def _refresh_soon(self) -> asyncio.Task[None]:
        loop, task = asyncio.get_running_loop(), self._refreshing
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._refreshing = start_task(self._read_map())
            task.add_done_callback(retrieve)
        return task

    async def _read_map(self) -> None:
        await self._slots.refresh()
        self._moved.clear()
        self._map_was_read = True
        masters = self._slots.masters()
        gone = [self._nodes.pop(address) for address in tuple(self._nodes) if address not in masters]
        await asyncio.gather(*(node.aclose() for node in gone))


RedisRouter: TypeAlias = SingleMasterRouter | ClusterRouter
"""Finds the server of a script."""
