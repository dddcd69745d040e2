"""
The nodes of a cluster, and one call to it, whichever node answers.

The call asks the nodes in an order. There are four reasons to ask the next one:

1. A node failed: it could not be reached, its answer was lost, or it says that it cannot answer.
2. No answer came for `patience` seconds. The requests that are under way go on, and the first answer counts.
3. All nodes hang. Then the call asks each once more, with twice the pause: after a failover a
   follower answers a new request, while one that it passed on to the former leader hangs for seconds.
4. A node says that another try will help. Then, after a pause, the call asks all nodes again, for as long as there are
   pauses; but at most two requests to each are under way.

Without a patience, one request at a time is under way. So it must be where a late one could grant a lock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from yarl import URL

from fencing_sdk._http.requests import RequestFailedError, RequestOutcome, any_unknown
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.tasks import retrieve, start_task
from fencing_sdk._values.url import joined, read_hosts
from fencing_sdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class EndpointRules:
    example: str
    """A URL of the store, for messages."""
    plain_port: int
    tls_port: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One node, with a URL for each path."""

    origin: str
    urls: dict[str, URL] = field(repr=False)

    @property
    def address(self) -> str:
        """``host:port``."""
        return _address(self.origin)


class Endpoints:
    """
    All nodes, in the order in which to ask them.

    Any node will do, because a node that is not the leader passes the request on. There are three rules:

    1. Ask first the node that answered last for the name. The memory of names is bounded.
    2. A node that failed goes to the end: its turn comes again when all others fail, and it is trusted when it answers.
    3. If an answer names a node, ask that one first the next time, but only if it is one of these. If another
       node has to answer after all, what the answers name for this lock is followed no more.
    """

    NAMES = 10_000

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._order = list(endpoints)
        self._by_address = {endpoint.address: endpoint for endpoint in self._order}
        self._failed: set[Endpoint] = set()
        self._serving: OrderedDict[str, _Serving] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def in_turn(self, name: str = "") -> Sequence[Endpoint]:
        """The nodes in their present order, for requests about *name*."""
        serving = self._serving.get(name)
        if serving is None or serving.first is self._order[0] or serving.first in self._failed:
            return tuple(self._order)
        return (serving.first, *(endpoint for endpoint in self._order if endpoint is not serving.first))

    def mark_failed(self, endpoint: Endpoint) -> None:
        """From now on, ask all other nodes before *endpoint*."""
        self._failed.add(endpoint)
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def mark_answered(self, endpoint: Endpoint, name: str = "", hint: object = None) -> None:
        """Note that *endpoint* has answered for *name*, and which node its answer named."""
        self._failed.discard(endpoint)
        if not name:
            return
        serving = self._serving.pop(name, None) or _Serving(endpoint)
        self._serving[name] = serving  # the newest
        if serving.hinted is serving.first is not endpoint:
            serving.misled = True
        serving.first = endpoint
        hinted = self._by_address.get(_address(hint)) if isinstance(hint, str) and not serving.misled else None
        if hinted is not None and hinted not in self._failed:
            serving.first = serving.hinted = hinted
        if len(self._serving) > self.NAMES:
            self._serving.popitem(last=False)


@dataclass(slots=True)
class _Serving:
    """The node to ask first for one name."""

    first: Endpoint
    hinted: Endpoint | None = None
    misled: bool = False


def _address(text: str) -> str:
    """``host:port``, of an origin too."""
    return text.rpartition("://")[2].rstrip("/").lower()


def read_endpoints(texts: object, rules: EndpointRules, *, tls: bool) -> Endpoints:
    """
    Read the address of each node: ``host``, ``host:port`` or ``[address]:port``.

    The order begins at a random node, so that the clients of a cluster do not all begin with one node.

    Raises:
        ConfigurationError: there is no address, or one cannot be read. The message does not repeat it,
            because it may hold a password.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        host = rules.example.partition("://")[2]
        msg = f"endpoints must be a sequence of 'host:port', such as ['{host}']"
        raise ConfigurationError(msg)
    port, scheme = (rules.tls_port, "https") if tls else (rules.plain_port, "http")
    read = dict.fromkeys(address.at(port) for address in read_hosts(texts, "endpoints"))
    if not read:
        msg = f"endpoints must name at least one node, such as {rules.example}"
        raise ConfigurationError(msg)
    endpoints = []
    for host, number in JITTER.sample(list(read), len(read)):
        try:
            urls = {path: URL.build(scheme=scheme, host=host, port=number, path=path) for path in rules.paths}
        except ValueError:
            msg = "endpoints has a host that cannot be read; write a name, an IPv4 address or an [IPv6 address]"
            raise ConfigurationError(msg) from None
        endpoints.append(Endpoint(f"{scheme}://{joined(host, number)}", urls))
    return Endpoints(endpoints)


T = TypeVar("T")

_AT_ONE_NODE = 2
"""Requests of one call that may be under way to one node."""

PATIENCE = 0.25
"""Seconds without an answer before the call asks the next node too. A healthy cluster answers in milliseconds."""


class NodeRace(Generic[T]):
    """
    The requests of one call.

    Args:
        order: The nodes, the one to ask first at the beginning.

        ask: Sends the request to one node; raises `RequestFailedError`.

        leave: Called with each node that failed, or that was overtaken by another one: ask it last from now on.

        patience: Seconds before the next node gets the request too; None: only after a failure.

        is_final: Whether this failure ends the call.

        pauses: Seconds before each further round, if a node has said that another try will help.
    """

    def __init__(
        self,
        order: Sequence[Endpoint],
        ask: Callable[[Endpoint], Coroutine[Any, Any, T]],
        *,
        leave: Callable[[Endpoint], None],
        patience: float | None,
        is_final: Callable[[RequestFailedError], bool],
        pauses: Iterable[float] = (),
    ) -> None:
        self._order = order
        self._ask = ask
        self._leave = leave
        self._patience = patience if len(order) > 1 else None
        self._is_final = is_final
        self._pauses = iter(pauses)
        self._again = False  # a node said in this round that another try will help
        self._under_way: dict[asyncio.Task[T], Endpoint] = {}
        self.failures: list[RequestFailedError] = []
        """The failures of the nodes, in order."""
        self.overtaken = False
        """True if a request was left without an answer: it may still be carried out."""

    @property
    def earlier_unknown(self) -> bool:
        """True if another request of this call may still be carried out."""
        return self.overtaken or any_unknown(self.failures)

    async def run(self) -> T:
        """
        Return the first answer.

        Raises:
            RequestFailedError: no node answered; it is the last of `failures`.
        """
        return await (self._run_one_by_one() if self._patience is None else self._run_side_by_side(self._patience))

    async def _run_one_by_one(self) -> T:
        while True:
            for endpoint in self._order:
                try:
                    return await self._ask(endpoint)
                except RequestFailedError as failure:
                    self._note(endpoint, failure)
                except asyncio.CancelledError:  # most often the engine's time limit: the node hangs
                    self._leave(endpoint)
                    raise
            pause = self._pause_before_another_round()
            if pause is None:
                raise self.failures[-1]
            await asyncio.sleep(pause)

    async def _run_side_by_side(self, patience: float) -> T:
        turns = self._turns(patience)
        try:
            while True:
                pause = next(turns, None)
                if not self._under_way:
                    if pause is None:
                        raise self.failures[-1]
                    await asyncio.sleep(pause)
                    continue
                done, _ = await asyncio.wait(self._under_way, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: task.exception() is not None):  # an answer first
                    endpoint, failure = self._under_way.pop(task), task.exception()
                    if not isinstance(failure, RequestFailedError):
                        return task.result()  # or raise another error
                    self._note(endpoint, failure)
        finally:
            await self._end()

    def _note(self, endpoint: Endpoint, failure: RequestFailedError) -> None:
        """Record a failure; raise it if it ends the call."""
        self.failures.append(failure)
        self._again = self._again or failure.again
        final = self._is_final(failure)
        did_its_part = failure.again or (final and failure.outcome is RequestOutcome.REJECTED)
        if not did_its_part:
            self._leave(endpoint)
        if final:
            raise failure

    def _turns(self, patience: float) -> Iterator[float]:
        """Ask the next node at each step; yield the seconds to wait for an answer."""
        for number in count(1):
            if number > 1 and not self._under_way and not self._again:
                return  # every node has failed, and none hangs
            pause = self._pause_before_another_round()
            if pause is not None and number > 1:
                yield pause
            elif number > _AT_ONE_NODE:
                return
            for endpoint in self._order:
                if list(self._under_way.values()).count(endpoint) < _AT_ONE_NODE:
                    task = start_task(self._ask(endpoint), "fencing-http")
                    self._under_way[task] = endpoint
                    yield patience * min(number, _AT_ONE_NODE)

    def _pause_before_another_round(self) -> float | None:
        """Return the seconds before another round, if a node has said that one would help; else None."""
        again, self._again = self._again, False
        return next(self._pauses, None) if again else None

    async def _end(self) -> None:
        """Give up the requests that are left, also when the caller is cancelled: most often their nodes hang."""
        left, self._under_way = self._under_way, {}
        self.overtaken = bool(left)
        for endpoint in reversed(dict.fromkeys(left.values())):  # the one that hangs for the longest time at the end
            self._leave(endpoint)
        for task in left:
            task.add_done_callback(retrieve)
            task.cancel()
        if left:
            await asyncio.wait(left)
