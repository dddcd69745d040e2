"""
Which server runs a script.

`OneMaster` is a single server, or whichever one Sentinels call the master now. `ManyMasters` is a
Redis Cluster: the slot of a script's keys decides, and a server that has handed the slot on says
where it went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextvars import Context
from typing import Protocol

from fencing_sdk.backends.redis._cluster import SlotMap, slot_of
from fencing_sdk.backends.redis._dial import Dialer
from fencing_sdk.backends.redis._node import Node, Outcome, UnconfirmedError, cancellations, outcome_of
from fencing_sdk.backends.redis._pipe import PipeError, Reply, ReplyError
from fencing_sdk.backends.redis._script import Call

MakeNode = Callable[[Dialer], Node]

_REDIRECTIONS = {"MOVED", "ASK"}
_HOPS = 5
"""Servers that one call is sent on to before it fails: slots move one at a time."""


class Router(Protocol):
    """Finds the server of a script."""

    async def node(self, key: str) -> Node:
        """The server that has *key*."""
        ...

    async def run(self, call: Call) -> Reply:
        """Run one script where its keys are."""
        ...

    async def run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        """
        Run many at once, in one write for each server; each has its own outcome.

        Cancelled while some servers have answered and others have not, it returns what it has.
        """
        ...

    def nodes(self) -> Sequence[Node]:
        """Every server that is known."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class OneMaster:
    """Every script runs on one server."""

    def __init__(self, dialer: Dialer, make_node: MakeNode) -> None:
        self._node = make_node(dialer)

    async def node(self, key: str) -> Node:  # noqa: ARG002  (it has every key)
        return self._node

    async def run(self, call: Call) -> Reply:
        return await self._node.run(call)

    async def run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        return await self._node.run_all(calls)

    def nodes(self) -> Sequence[Node]:
        return (self._node,)

    async def aclose(self) -> None:
        await self._node.aclose()


class ManyMasters:
    """Every script runs on the server that owns the slot of its keys."""

    def __init__(self, slots: SlotMap, make_node: MakeNode) -> None:
        self._slots = slots
        self._make_node = make_node
        self._nodes: dict[str, Node] = {}
        self._moved: dict[int, str] = {}  # what servers said of single slots since the map was read
        self._refreshing: asyncio.Task[None] | None = None
        self._known = False

    async def node(self, key: str) -> Node:
        await self._ready()
        return self._owner(slot_of(key.encode()))

    async def run(self, call: Call) -> Reply:
        await self._ready()
        slot = slot_of(call.keys[0].encode())
        node = self._owner(slot)
        for _ in range(_HOPS):
            try:
                return await node.run(call)
            except ReplyError as error:
                following = self._redirected(error, slot)
                if following is None:
                    raise
                node = following
                if error.code == "ASK":
                    return await node.run_asking(call)
            except Exception as error:
                self._doubt(error)
                raise
        msg = "the slot moved on and on"
        raise PipeError(msg)

    async def run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        try:
            await self._ready()
        except Exception as error:  # noqa: BLE001  (each call fails by what the driver raised)
            return [error] * len(calls)
        outcomes: list[Outcome] = [None] * len(calls)
        shares: dict[Node, list[int]] = {}
        for number, call in enumerate(calls):
            try:
                node = self._owner(slot_of(call.keys[0].encode()))
            except Exception as error:  # noqa: BLE001  (a slot that nobody serves stops no other)
                outcomes[number] = error
            else:
                shares.setdefault(node, []).append(number)
        work = {
            asyncio.ensure_future(self._share(node, [calls[n] for n in numbers])): numbers
            for node, numbers in shares.items()
        }
        await _all_that_answer(work)
        for task, numbers in work.items():
            share = task.result() if task.done() else [PipeError("the server did not answer in time")] * len(numbers)
            for number, outcome in zip(numbers, share, strict=True):
                outcomes[number] = outcome
        return outcomes

    async def _share(self, node: Node, calls: Sequence[Call]) -> list[Outcome]:
        """What one server is asked; one that is down stops no other."""
        outcomes = await node.run_all(calls)
        elsewhere: list[int] = []
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, ReplyError) and outcome.code in _REDIRECTIONS:
                elsewhere.append(number)
            elif isinstance(outcome, Exception):
                self._doubt(outcome)
        answers = await asyncio.gather(*(outcome_of(self.run(calls[number])) for number in elsewhere))
        for number, answer in zip(elsewhere, answers, strict=True):
            outcomes[number] = answer
        return outcomes

    def nodes(self) -> Sequence[Node]:
        return tuple(self._nodes.values())

    async def aclose(self) -> None:
        nodes, refreshing = tuple(self._nodes.values()), self._refreshing
        self._nodes.clear()
        self._moved.clear()
        self._refreshing = None
        self._known = False
        if refreshing is not None and refreshing.get_loop() is asyncio.get_running_loop():
            refreshing.cancel()
            await asyncio.wait((refreshing,))
        await asyncio.gather(*(node.aclose() for node in nodes))

    def _doubt(self, error: Exception) -> None:
        """Read the map anew after an *error* that no server answered: its replica may have taken over."""
        if self._known and not isinstance(error, ReplyError | UnconfirmedError):  # else the next call reads it
            self._refresh_soon()

    def _redirected(self, error: ReplyError, slot: int) -> Node | None:
        """Where a slot is now, or is just going, by the words of a server that has it no more."""
        if error.code not in _REDIRECTIONS:
            return None
        address = error.words[2]
        if error.code == "MOVED":
            self._moved[slot] = address
            self._refresh_soon()
        return self._at(address)

    async def _ready(self) -> None:
        """Read the map, unless it was read before; it is read again when it turns out to be wrong."""
        if not self._known:
            await self._refresh()

    def _owner(self, slot: int) -> Node:
        address = self._moved.get(slot)
        try:
            return self._at(self._slots.address(slot) if address is None else address)
        except Exception as error:
            self._doubt(error)
            raise

    def _at(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(self._slots.dialer(address))
        return node

    async def _refresh(self) -> None:
        task, before = self._refresh_soon(), cancellations()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and cancellations() == before:
                msg = "the backend was closed while it looked for the servers"
                raise PipeError(msg) from None
            raise

    def _refresh_soon(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.get_loop() is not asyncio.get_running_loop():
            self._refreshing = asyncio.get_running_loop().create_task(self._read_map(), context=Context())
            self._refreshing.add_done_callback(self._refreshed)
        return self._refreshing

    async def _read_map(self) -> None:
        await self._slots.refresh()
        self._moved.clear()
        self._known = True
        masters = self._slots.masters()
        gone = [self._nodes.pop(address) for address in tuple(self._nodes) if address not in masters]
        await asyncio.gather(*(node.aclose() for node in gone))

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        if task is self._refreshing:
            self._refreshing = None
        if not task.cancelled():
            task.exception()  # each who waits is told; if nobody does, the next call tries again


async def _all_that_answer(work: Collection[asyncio.Future[list[Outcome]]]) -> None:
    """
    Wait for *work*. When cancelled, be content with what has been answered, if anything has.

    So a server that stands still takes no answers of others along: at the limit of a call, half of it is
    worth more than nothing.
    """
    try:
        await asyncio.wait(work) if work else None
    except asyncio.CancelledError:
        for task in work:
            task.cancel()
        if not any(task.done() for task in work):
            raise
