"""
Which server runs a script.

`SingleMasterRouter`: one server, or the one that Sentinels call the master now. `ClusterRouter`: the slot of the
script's keys decides, by a map that a server of the cluster has sent. The map may be out of date. It is read again:

1. When a server replies MOVED. It names the server that has the slot now, and the call goes on there.
2. When a server cannot be reached, or the map names none for a slot: a replica may have become the master.

While a slot is moving, a server replies ASK for keys that have left it, and the call goes on at the server it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import NamedTuple, TypeAlias

from fencing_sdk._values.tasks import cancel_and_wait, retrieve
from fencing_sdk.backends.redis.connection.dial import ServerDialer
from fencing_sdk.backends.redis.connection.node import (
    CallOutcome,
    RedisNode,
    UnconfirmedError,
    cancellations,
    outcome_of,
)
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis.connection.topology import SlotMap, slot_of
from fencing_sdk.backends.redis.scripts import ScriptCall

MakeNode = Callable[[ServerDialer], RedisNode]

_REDIRECTIONS = {"MOVED", "ASK"}
_HOPS = 5
"""Servers that one call tries before it fails: slots move one at a time."""


class Masters(NamedTuple):
    """The servers that have the keys of locks."""

    nodes: Sequence[RedisNode]
    layout: str
    """Which of them has which slots: a digest, or "" for a single master."""


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

    def nodes(self) -> Sequence[RedisNode]:
        """Every known server."""
        return (self._node,)

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
                self._moved[slot_of(call.keys[0].encode())] = address
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
            asyncio.ensure_future(self._run_on(node, [calls[n] for n in numbers])): numbers
            for node, numbers in by_node.items()
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

    def nodes(self) -> Sequence[RedisNode]:
        """See `SingleMasterRouter.nodes`."""
        return tuple(self._nodes.values())

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
        slot = slot_of(key.encode())
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
            task = self._refreshing = loop.create_task(self._read_map(), context=Context())
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
