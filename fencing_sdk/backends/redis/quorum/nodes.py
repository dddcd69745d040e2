"""
All nodes of a quorum: which of them vote together, what a majority shows, and what is raised when they are too few.

Nodes vote together in one epoch, and no answer of another epoch is ever counted. The epoch of a majority is the one.
A node that is away is tried again from time to time, by the way. Only a caller that finds no majority waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends.redis.connection.dial import RedisDialer, UnreachableError
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis.quorum.ballots import majority_of
from fencing_sdk.backends.redis.quorum.node import SILENCE, NodeRequest, QuorumNode
from fencing_sdk.backends.redis.quorum.requests import BACKEND, QuorumRequests, SeenHold
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

_GRACE = 0.05
"""Seconds for which a caller that had to wait for a majority waits for the rest."""
_FAREWELL = 0.25
"""Seconds for which closing waits until the nodes have what frees a lock."""

_NOT_FOUNDED = (
    "no node remembers that the quorum was founded; run: fencing init --url redis+quorum://... "
    "(if it was founded, all nodes have lost their memory)"
)


class Voters(NamedTuple):
    """The nodes that vote together, at least a majority of all."""

    epoch: str
    nodes: Sequence[QuorumNode]
    pipes: Sequence[Pipe | None]
    """Connections to them."""
    owner: LoopOwner


class QuorumNodes:
    """The nodes, by their numbers."""

    def __init__(self, dialers: Sequence[RedisDialer], requests: QuorumRequests) -> None:
        self._nodes = [QuorumNode(number, dialer, requests, len(dialers)) for number, dialer in enumerate(dialers)]
        self.majority = majority_of(len(dialers))
        self._voters: Voters | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[QuorumNode]:
        return iter(self._nodes)

    def __getitem__(self, number: int) -> QuorumNode:
        return self._nodes[number]

    def voters(self) -> Voters | None:
        """
        The nodes that vote now. Nodes that are away are tried again in the background.

        Raises:
            BackendRefusedError: two of the addresses lead to the same server.
        """
        known = self._voters
        if known is not None and known.owner.is_current and len(known.pipes) == len(self._nodes):
            for node, pipe in zip(self._nodes, known.pipes, strict=True):
                if node.asked is not pipe or pipe is None or not pipe.usable:
                    break
            else:
                return known
        self._voters = self._find_voters()
        return self._voters

    def _find_voters(self) -> Voters | None:
        voting: list[QuorumNode] = []
        epochs: Counter[str] = Counter()
        for node in self._nodes:
            epoch = node.epoch
            if epoch is None:
                node.open_soon()
            else:
                voting.append(node)
                epochs[epoch] += 1
        if len(voting) < self.majority:
            return None
        self._check_identities()  # also of a node that was reached later than the majority
        epoch, count = epochs.most_common(1)[0]
        if count < self.majority:
            return None
        if count < len(voting):
            for node in voting:
                node.open_soon()  # it may have a newer epoch than in its last answer
            voting = [node for node in voting if node.epoch == epoch]
        return Voters(epoch, voting, [node.asked for node in voting], LoopOwner())

    async def quorum(self) -> Voters:
        """
        The nodes that vote, after waiting until a majority of them is connected.

        Raises:
            BackendRefusedError: the quorum was never founded, or its addresses are wrong.
            BackendUnavailableError: too few nodes remember their epoch, or share one.
            Exception: too few nodes can be reached.
        """
        voters = self.voters()
        if voters is not None:
            return voters
        for node in self._nodes:
            node.open_soon(at_once=True)  # those that vote too: their answers may have changed
        while voters is None and (opening := self._opening()):
            await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            voters = self.voters()
        if voters is None:
            raise self._why_no_majority()
        if opening := self._opening():
            await asyncio.wait(opening, timeout=_GRACE)
        self._check_identities()
        return self.voters() or voters

    def _opening(self) -> set[asyncio.Task[None]]:
        return {task for node in self._nodes if (task := node.opening) is not None}

    async def reach_all(self) -> None:
        """Connect to every node. Raise an error if one cannot be reached."""
        tasks = [node.open_soon(at_once=True) for node in self._nodes if not node.open_pipe]
        opening = [task for task in tasks if task is not None]
        if opening:
            await asyncio.wait(opening)
        errors = [node.error for node in self._nodes if not node.open_pipe and node.error is not None]
        if errors:
            raise most_telling(errors)
        self._check_identities()

    def _check_identities(self) -> None:
        """Refuse two addresses of one server: it would vote twice."""
        known = [node.knowledge.id for node in self._nodes if node.open_pipe and node.knowledge and node.knowledge.id]
        if len(set(known)) < len(known):
            msg = "two of the addresses lead to the same server, which would vote twice"
            raise BackendRefusedError(BACKEND, "connect", msg)

    def _why_no_majority(self) -> Exception:
        reached = [node for node in self._nodes if node.open_pipe is not None]
        errors = [node.error for node in self._nodes if node.open_pipe is None and node.error is not None]
        refusal = next((error for error in errors if isinstance(error, BackendRefusedError)), None)
        if refusal is not None:
            return refusal
        if len(reached) < self.majority:
            return most_telling(errors)
        if all(node.forgetful for node in reached):
            return BackendRefusedError(BACKEND, "connect", _NOT_FOUNDED)
        forgetful = sum(node.forgetful for node in reached)
        msg = f"no majority of the nodes shares an epoch, and {forgetful} have lost their memory; run: fencing init"
        return BackendUnavailableError(BACKEND, "connect", msg)

    async def aclose(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(node.aclose(patience=_FAREWELL) for node in self._nodes))


def most_telling(errors: Sequence[Exception]) -> Exception:
    """Prefer what a server replied to the news that others are away."""
    replies = [error for error in errors if not isinstance(error, UnreachableError | PipeError)]
    replies.sort(key=lambda error: isinstance(error, ReplyError) and error.code == "EPOCH")
    if replies:
        return replies[0]
    unreached = [error for error in errors if isinstance(error, UnreachableError)]
    if unreached:
        return UnreachableError(f"too few nodes answer for a majority: {UnreachableError.of_all(unreached)}")
    return errors[0] if errors else PipeError("too few nodes are connected")


T = TypeVar("T")


class Poll(Generic[T]):
    """
    The answers to one question, of which so many *nodes* are *asked*.

    *read* raises an error for a reply that is not an answer. If the answers of a majority are not *enough*, the others
    are awaited for `SILENCE` seconds.
    """

    def __init__(
        self, nodes: int, asked: int, read: Callable[[Reply], T], enough: Callable[[Collection[T]], bool]
    ) -> None:
        self._majority = majority_of(nodes)
        self._left = asked
        self._read = read
        self._enough = enough
        self._answers: dict[int, T] = {}
        self._errors: list[Exception] = []
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, node: int, outcome: CallOutcome) -> None:
        """Take note of the answer of a node."""
        if self._done.done():
            return
        self._left -= 1
        try:
            if isinstance(outcome, Exception):
                raise outcome  # noqa: TRY301
            self._answers[node] = self._read(outcome)
        except Exception as error:  # noqa: BLE001
            self._errors.append(error)
        heard = len(self._answers) >= self._majority
        hopeless = len(self._answers) + self._left < self._majority
        if self._left == 0 or hopeless or (heard and self._enough(self._answers.values())):
            self._end()
        elif heard and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SILENCE, self._end)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._done.set_result(None)

    async def result(self) -> Mapping[int, T]:
        """Wait for the answers that come in time; return them by node. Raise an error if no majority has answered."""
        await self._done
        if len(self._answers) < self._majority:
            raise most_telling(self._errors)
        return self._answers


async def ask_nodes(
    nodes: QuorumNodes, call: ScriptCall, read: Callable[[Reply], T], enough: Callable[[Collection[T]], bool]
) -> Mapping[int, T]:
    """Ask the nodes that vote, as `Poll` describes it. Raise an error if no majority has answered."""
    voters = nodes.voters() or await nodes.quorum()
    poll = Poll(len(nodes), len(voters.nodes), read, enough)
    request = NodeRequest(call)
    for node in voters.nodes:
        node.send(request, poll.answer)
    return await poll.result()


def shown_by_majority(seen: Collection[SeenHold | None], majority: int) -> SeenHold | None:
    """The hold of the one ticket that a *majority* shows, and how long it lasts there; None: there is none."""
    counts = Counter(hold.ticket for hold in seen if hold is not None)
    shown, count = counts.most_common(1)[0] if counts else (None, 0)
    if count < majority:
        return None
    holds = [hold for hold in seen if hold is not None and hold.ticket == shown]
    return holds[0]._replace(left=sorted((hold.left for hold in holds), reverse=True)[majority - 1])
