"""
The waiters of one client, and what wakes them.

Each node keeps a line for each lock (see `line.lua`). A waiter stands in the line of every node at once, with
one score: the microseconds of its client's clock when it joined. So all nodes have the same order, that of arrival as
far as the clients' clocks agree. A node grants a free lock to the head of its line alone. What wakes a waiter:

1. Its turn. A release publishes the waiter's ticket on every node. The waiter wakes when a majority of the messages has
   come, or 20 ms after the first, if others do not come.
2. A node that votes again: messages were lost meanwhile.
3. Time. It tries again once a second, and when enough holds in its way end. A try is also its sign of life, and where
   a node answers that it is not in the line, it joins there again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import JITTER, wall_micros
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable, new_ticket
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply
from fencing_sdk.backends.redis.quorum.ballots import Ballot
from fencing_sdk.backends.redis.quorum.node import NodeRequest, QuorumNode
from fencing_sdk.backends.redis.quorum.nodes import Poll, QuorumNodes
from fencing_sdk.backends.redis.quorum.requests import LinePlace, QuorumRequests
from fencing_sdk.backends.redis.requests import RedisKeys
from fencing_sdk.backends.redis.waiters import ClientId

_STRAGGLERS = 0.02
"""Seconds after the first message in which the others should come."""
_FIRST_SPLIT, _LONGEST_SPLIT = 0.002, 0.25
"""Seconds before another try, after rivals have split the nodes."""


class QuorumWaiter(Waiter):
    """A waiter in the line of one lock, on every node."""

    __slots__ = ("_majority", "_messages", "_timer", "place", "served_by", "splits")

    def __init__(self, claim: Claim, place: LinePlace, majority: int) -> None:
        super().__init__(claim, place.ticket)
        self.place = place
        self.splits = 0
        """Tries in a row in which rivals have split the nodes."""
        self.served_by: set[int] = set()
        """The nodes that have granted it the lock, and so have taken it out of their line."""
        self._majority = majority
        self._messages: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, node: int) -> None:
        """Take note of a message that it is the waiter's turn on *node*."""
        self._messages.add(node)
        if len(self._messages) >= self._majority:
            self.wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_STRAGGLERS, self.wake)

    def wake(self) -> None:
        """See `Waiter.wake`."""
        self._messages.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().wake()


class QuorumWaiters:
    """All waiters of one backend."""

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests, keys: RedisKeys) -> None:
        self._nodes = nodes
        self._requests = requests
        self._keys = keys
        self._id = ClientId()
        self._last_score = 0
        self.table: WaiterTable[QuorumWaiter] = WaiterTable()

    async def join(self, claim: Claim) -> QuorumWaiter:
        """
        Join the line of a lock on all nodes, until `leave`; return when a majority has the waiter in its line.

        Raise an error if no majority can be reached.
        """
        await self._nodes.quorum()
        self._last_score = max(self._last_score + 1, wall_micros())
        place = LinePlace(self._last_score, self._keys.wake_channel(str(self._id)), new_ticket())
        waiter = self.table.add(QuorumWaiter(claim, place, self._nodes.majority))
        entered = self._poll()
        try:
            for node in self._nodes:
                self._enter(node, waiter, entered)
            await entered.result()
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    def _enter(self, node: QuorumNode, waiter: QuorumWaiter, entered: Poll[Reply] | None = None) -> None:
        """Send SUBSCRIBE, unless this connection has sent it, and JOIN behind it: so no message is missed."""

        def joined(number: int, outcome: CallOutcome) -> None:
            if entered is not None:
                entered.answer(number, outcome)
            if self.table.find(waiter.claim) is not waiter and number not in waiter.served_by:  # it has left meanwhile
                node.send(NodeRequest(self._requests.leave(waiter.claim)), lambda _node, _outcome: None)

        pipe = node.open_pipe
        if pipe is not None:
            self._subscribe(pipe)
        node.send(NodeRequest(self._requests.join(waiter.claim, waiter.place)), joined)

    def _subscribe(self, pipe: Pipe) -> None:
        channel = self._keys.wake_channel(str(self._id))
        if channel not in pipe.channels:
            subscription = pipe.channels[channel] = pipe.subscribe("SUBSCRIBE", channel)
            subscription.add_done_callback(retrieve)  # if it is not permitted, the waiters try once a second

    def granted(self, waiter: QuorumWaiter, ballot: Ballot) -> None:
        """Take note that the lock was granted to *waiter*, and by which nodes."""
        waiter.served = True
        waiter.served_by = set(ballot.grants)

    def refused(self, waiter: QuorumWaiter, ballot: Ballot) -> None:
        """Let *waiter* join the line again where a node has dropped it."""
        waiter.splits = 0 if ballot.held else waiter.splits + 1
        if self.table.find(waiter.claim) is waiter:
            for number, refusal in ballot.refusals.items():
                if not refusal.in_line:
                    self._enter(self._nodes[number], waiter)

    async def leave(self, waiter: QuorumWaiter) -> None:
        """
        Leave the line on every node. A node that is away drops the waiter for lack of a sign of life.

        Raises no error: an error would replace the cancellation that ends the wait.
        """
        self.table.remove(waiter)
        request = NodeRequest(self._requests.leave(waiter.claim))
        left = self._poll()
        for node in self._nodes:
            if node.number in waiter.served_by:
                left.answer(node.number, None)
            else:
                node.send(request, left.answer)
        if not waiter.served:
            with suppress(Exception):
                await left.result()

    def _poll(self) -> Poll[Reply]:
        """Wait until a majority has answered without an error, or no longer can."""
        return Poll(len(self._nodes), len(self._nodes), lambda reply: reply, lambda _: True)

    def on_vote(self, pipe: Pipe) -> None:
        """Subscribe on a new connection, and let every waiter try: messages may have been lost."""
        if len(self.table):
            self._subscribe(pipe)
            self.table.wake_all()

    def on_push(self, node: int, message: list[Reply]) -> None:
        """Wake the waiter that a message names."""
        if message[0] == b"message" and isinstance(message[2], bytes):
            waiter = self.table.find_ticket(message[2].decode(errors="replace"))
            if waiter is not None:
                waiter.hear(node)


def pause_after_split(splits: int) -> float:
    """Seconds before another try, after the nodes were split so many times in a row. Random: rivals should part."""
    doubled: int = 1 << min(max(splits - 1, 0), 7)
    return min(JITTER.uniform(1, 5) * _FIRST_SPLIT * doubled, _LONGEST_SPLIT)
