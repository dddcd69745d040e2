"""A call to a cluster: who is asked when, what counts as the answer, and who is asked last from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from virtual_time import in_virtual_time, now

from fencing_sdk._http.nodes import PATIENCE, Endpoint, NodeRace
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome

NODES = [Endpoint(name, {}) for name in "abc"]
HANGS = 10_000.0


def unknown(text: str = "lost") -> RequestFailedError:
    return RequestFailedError(RequestOutcome.UNKNOWN, text)


class Cluster:
    """Nodes that answer with their name after so many seconds, or fail; a list has one of these for each request."""

    def __init__(self, **nodes: float | RequestFailedError | list[float | RequestFailedError]) -> None:
        self._nodes = nodes
        self.asked: list[tuple[float, str]] = []
        self.left: list[str] = []
        self.given_up = 0

    async def ask(self, endpoint: Endpoint) -> str:
        self.asked.append((round(now(), 3), endpoint.origin))
        heard = self._nodes[endpoint.origin]
        answer = heard.pop(0) if isinstance(heard, list) else heard
        if isinstance(answer, RequestFailedError):
            raise answer
        try:
            await asyncio.sleep(answer)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return endpoint.origin

    def race(
        self,
        patience: float | None = PATIENCE,
        *,
        is_final: Callable[[RequestFailedError], bool] = lambda _: False,
        pauses: Iterable[float] = (),
    ) -> NodeRace[str]:
        nodes = [node for node in NODES if node.origin in self._nodes]
        return NodeRace(
            nodes,
            self.ask,
            leave=lambda node: self.left.append(node.origin),
            patience=patience,
            is_final=is_final,
            pauses=pauses,
        )


@in_virtual_time
async def test_a_healthy_cluster_is_asked_once():
    cluster = Cluster(a=0.2, b=0.0, c=0.0)
    race = cluster.race()
    assert await race.run() == "a"
    assert cluster.asked == [(0.0, "a")]
    assert not race.earlier_unknown
    assert not cluster.left


@in_virtual_time
async def test_a_node_that_hangs_is_overtaken_and_asked_last():
    cluster = Cluster(a=HANGS, b=0.01, c=0.0)
    race = cluster.race()
    assert await race.run() == "b"
    assert cluster.asked == [(0.0, "a"), (0.25, "b")]
    assert race.earlier_unknown, "what the node was asked may still be carried out"
    assert cluster.left == ["a"]
    assert cluster.given_up == 1


@in_virtual_time
async def test_a_slow_node_may_still_be_the_first_to_answer():
    cluster = Cluster(a=0.3, b=HANGS, c=HANGS)
    assert await cluster.race().run() == "a"
    assert cluster.left == ["b"]


@in_virtual_time
async def test_after_a_failure_the_next_node_is_asked_at_once():
    cluster = Cluster(a=unknown(), b=0.0)
    race = cluster.race()
    assert await race.run() == "b"
    assert cluster.asked == [(0.0, "a"), (0.0, "b")]
    assert race.earlier_unknown
    assert cluster.left == ["a"]


@in_virtual_time
async def test_nodes_that_all_hang_are_asked_once_more():
    """A follower that passed a request on to the former leader answers a new one at once."""
    cluster = Cluster(a=HANGS, b=[HANGS, 0.0], c=HANGS)
    assert await cluster.race().run() == "b"
    assert cluster.asked == [(0.0, "a"), (0.25, "b"), (0.5, "c"), (0.75, "a"), (1.25, "b")]


@in_virtual_time
async def test_no_node_is_asked_a_third_time():
    cluster = Cluster(a=HANGS, b=HANGS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await cluster.race().run()
    assert [name for _, name in cluster.asked] == ["a", "b", "a", "b"]
    assert cluster.given_up == 4
    assert cluster.left == ["b", "a"], "the one that hangs for the longest time is asked last"


@in_virtual_time
async def test_when_every_node_fails_the_call_fails_at_once():
    cluster = Cluster(a=unknown("one"), b=unknown("two"))
    race = cluster.race()
    with pytest.raises(RequestFailedError, match="two"):
        await race.run()
    assert [str(failure) for failure in race.failures] == ["one", "two"]
    assert now() == 0


@in_virtual_time
async def test_a_failure_waits_for_the_answer_of_a_node_that_is_slow():
    cluster = Cluster(a=5.0, b=unknown())
    assert await cluster.race().run() == "a"


@in_virtual_time
async def test_a_rejection_by_the_cluster_ends_the_call_and_costs_the_node_nothing():
    cluster = Cluster(a=RequestFailedError(RequestOutcome.REJECTED, "no", code=7), b=0.0)
    with pytest.raises(RequestFailedError, match="no"):
        await cluster.race(is_final=lambda failure: bool(failure.code)).run()
    assert not cluster.left


@in_virtual_time
async def test_without_patience_one_request_at_a_time_is_under_way():
    """A late grant would be one that the engine does not know of."""
    cluster = Cluster(a=3.0, b=0.0)
    assert await cluster.race(None).run() == "a"
    assert cluster.asked == [(0.0, "a")]


@in_virtual_time
async def test_without_patience_a_node_that_costs_the_call_is_asked_last():
    cluster = Cluster(a=HANGS, b=0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await cluster.race(None).run()
    assert cluster.left == ["a"]


@in_virtual_time
async def test_a_single_node_is_not_asked_twice():
    cluster = Cluster(a=3.0)
    assert await cluster.race().run() == "a"
    assert cluster.asked == [(0.0, "a")]


@in_virtual_time
async def test_an_error_of_our_own_is_no_failure_of_a_node():
    async def ask(endpoint: Endpoint) -> str:
        raise ZeroDivisionError

    race = NodeRace(NODES, ask, leave=lambda _: None, patience=PATIENCE, is_final=lambda _: False)
    with pytest.raises(ZeroDivisionError):
        await race.run()


def not_yet() -> RequestFailedError:
    return RequestFailedError(RequestOutcome.UNSENT, "not yet", again=True)


@in_virtual_time
async def test_a_node_that_cannot_answer_yet_is_followed_at_once_and_stays_where_it_is():
    cluster = Cluster(a=not_yet(), b=0.0)
    assert await cluster.race(pauses=[0.1]).run() == "b"
    assert cluster.asked == [(0.0, "a"), (0.0, "b")]
    assert not cluster.left


@pytest.mark.parametrize("patience", [PATIENCE, None])
@in_virtual_time
async def test_while_a_node_says_so_all_are_asked_again(patience: float | None):
    cluster = Cluster(a=[not_yet(), not_yet(), 0.0], b=unknown())
    assert await cluster.race(patience, pauses=[0.1, 0.2, 0.4]).run() == "a"
    assert [at for at, name in cluster.asked if name == "a"] == [0.0, 0.1, 0.3]


@pytest.mark.parametrize("patience", [PATIENCE, None])
@in_virtual_time
async def test_when_the_pauses_are_over_the_call_fails(patience: float | None):
    cluster = Cluster(a=not_yet(), b=not_yet())
    with pytest.raises(RequestFailedError, match="not yet"):
        await cluster.race(patience, pauses=[0.1, 0.2]).run()
    assert len(cluster.asked) == 6
    assert now() == pytest.approx(0.3)


@in_virtual_time
async def test_nodes_that_hang_do_not_keep_the_others_from_being_asked_again():
    """After an election the node that could not answer yet is the only one that can."""
    cluster = Cluster(a=HANGS, b=HANGS, c=[not_yet()] * 8 + [0.0])
    assert await cluster.race(pauses=[0.1] * 20).run() == "c"
    names = [name for _, name in cluster.asked]
    assert (names.count("a"), names.count("b"), names.count("c")) == (2, 2, 9)
    assert now() < 4.0
