"""The quorum of Redis masters keeps the contract, and what the answers of its nodes amount to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
from own_server import OwnServer
from patience import until
from redis_quorum import Quorum
from redis_server import RedisServer
from redis_stage import change_scripts

from fencing_sdk.abc import HELD, Backend, Claim, Gone, Place
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend, from_url, requests
from fencing_sdk.backends.redis.quorum.ballots import Ballot, BallotVerdict, KeepRound, QuorumHold, Refusal
from fencing_sdk.testing import BackendSuite, Comparison
from fencing_sdk.testing.promises.under_test import DRIFT, Reopen

pytest_plugins = ["redis_fixtures"]


# The quorum of Redis masters keeps the contract: with three and five nodes, all up or as many down as may be.


@pytest.fixture(scope="module")
def three_nodes(redis_binary: str) -> Iterator[Quorum]:
    """Three masters whose data outlives them, for this module."""
    with Quorum(3, binary=redis_binary, appendonly=True, appendfsync="always") as quorum:
        yield quorum


@pytest.fixture(scope="module")
def five_nodes(redis_binary: str) -> Iterator[Quorum]:
    """Five masters whose data outlives them, for this module."""
    with Quorum(5, binary=redis_binary, appendonly=True, appendfsync="always") as quorum:
        yield quorum


class QuorumComparison(Comparison):
    """A quorum keeps an operator's reason when the owner draws again; the rules forget it."""

    def _equal(self, theirs: object, ours: object) -> None:
        if isinstance(theirs, Gone) and isinstance(ours, Gone) and ours.reason is None:
            theirs = theirs._replace(reason=None)
        super()._equal(theirs, ours)


def heard_by_all(store: Backend) -> Backend:
    """Let each verb last until every node has answered: a majority is enough, and another client may be quicker."""
    assert isinstance(store, RedisQuorumBackend)

    def lasting(verb):
        async def call(*arguments, **named):
            answer = await verb(*arguments, **named)
            pipes = [node.open_pipe for node in store._nodes if node.open_pipe]
            await asyncio.gather(*(pipe.call("PING") for pipe in pipes))
            return answer

        return call

    for name in ("draw", "keep", "give_back", "end"):
        setattr(store, name, lasting(getattr(store, name)))
    return store


class QuorumSuite(OwnServer, BackendSuite):
    lines = shares = False
    ttl = 0.5
    expiry_lag = 3.0
    """The holds of a grant end one after the other, as they began, and a try in between is undone first: so is one
    that a node does not answer at once, on a busy machine."""
    stopped = 0
    """Nodes that are down throughout."""

    @pytest.fixture
    async def server(self, three_nodes: Quorum) -> Quorum:
        return await self.some_of(three_nodes)

    async def some_of(self, quorum: Quorum) -> Quorum:
        """Stop as many nodes of a fresh quorum as are to be down."""
        await quorum.fresh()
        self.own_server, self.up = quorum, quorum.nodes[self.stopped :]
        for node in quorum.nodes[: self.stopped]:
            node.kill()
        return quorum

    async def expire(self, ttl: float) -> None:
        """Wait until the holds have ended on every node: on a busy machine some nodes begin a ttl later than others."""
        await self.pass_time(ttl * (1 + DRIFT))
        within = self.expiry_lag + self.patience
        await until(lambda: not any(_ends_within(node, ttl) for node in self.up), what="no hold is left", within=within)

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill nodes until the others are not a majority, when all of them have what was granted."""
        await self.granted_everywhere()
        killed = self.up[: len(self.up) - self.own_server.majority + 1]
        for node in killed:
            await asyncio.to_thread(node.kill)
        try:
            yield
        finally:
            for node in killed:
                await asyncio.to_thread(node.start)

    def kill(self) -> None:
        for node in self.up:
            node.kill()

    def start(self) -> None:
        for node in self.up:
            node.start()

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the nodes too, by force, when all of them have what was granted."""
        await self.granted_everywhere()
        return await super().restart(backend, reopen)

    async def test_it_answers_as_the_rules(self, backend: Backend, reopen: Reopen) -> None:
        other = reopen()
        await self.ready(other)
        stores = heard_by_all(backend), heard_by_all(other)
        for seed in range(self.histories):
            await QuorumComparison(stores, seed).play()
        await other.aclose()

    async def ready(self, backend: Backend) -> None:
        """Wait until the client knows all nodes that are up: an open client may know a majority, and asks no others."""
        await until(lambda: _voters(backend) == len(self.up), what="all nodes vote that are up")

    async def granted_everywhere(self) -> None:
        """Wait for the nodes that a grant did not wait for: one that never hears of it is given a hold later."""
        await until(lambda: len({_holds(node) for node in self.up}) == 1, what="all nodes have the same holds")


def _voters(backend: Backend) -> int:
    assert isinstance(backend, RedisQuorumBackend)
    voters = backend._nodes.voters()
    return 0 if voters is None else len(voters.nodes)


def _holds(node: RedisServer) -> frozenset[object]:
    """The keys of the locks that are held on *node*."""
    return frozenset(node.ask("KEYS", "*}:h"))


def _ends_within(node: RedisServer, seconds: float) -> bool:
    """Whether a lock is held on *node* that ends in so many seconds at most."""
    lefts = node.ask_all(*(["PTTL", hold] for hold in node.ask("KEYS", "*}:h")))
    return any(0 <= left <= seconds * 1000 for left in lefts)


class TestThreeNodes(QuorumSuite):
    """All nodes are up."""


@pytest.mark.slow  # as few nodes as may be are up in five of which two are down, too
class TestThreeNodesOneDown(QuorumSuite):
    stopped = 1


class OnFiveNodes(QuorumSuite):
    @pytest.fixture
    async def server(self, five_nodes: Quorum) -> Quorum:
        return await self.some_of(five_nodes)


@pytest.mark.slow  # between three nodes that are up and five of which two are down there is little room
class TestFiveNodes(OnFiveNodes):
    """All nodes are up."""


class TestFiveNodesTwoDown(OnFiveNodes):
    stopped = 2


PLANTED = {
    "the ticket of another owner is given back": ("if held.owner ~= owner then return -1 end", ""),
    "the ticket of another owner is kept": ("elseif held.owner ~= owner then", "elseif false then"),
    "a keep reaches what is given back later": ("held.owner, held.digest = '-' .. owner,", "held.digest ="),
    "a lost reason": ("'^%d+%z%Z*%z(.*)$'", "'^%d+%z%Z*%z(.*)x$'"),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_change_of_the_quorum_is_caught(redis_quorum: Quorum, monkeypatch: pytest.MonkeyPatch, planted: str):
    change_scripts(monkeypatch, requests, *PLANTED[planted])
    async with aclosing(from_url(redis_quorum.url)) as one, aclosing(from_url(redis_quorum.url)) as other:
        stores = heard_by_all(one), heard_by_all(other)
        with pytest.raises(AssertionError):
            for seed in range(50):
                await QuorumComparison(stores, seed).play()


# What the answers of the nodes amount to, by tables: the ballot of an attempt, the tally of a round of renewals.


OPEN, WON, REFUSED, UNAVAILABLE = BallotVerdict
ATTEMPT = 50


def ballot_of(answers: str, *, nodes: int = 3) -> Ballot:
    """
    Give *answers* in order, each of the next node.

    ``7`` a grant with this number, ``x9`` a refusal by a hold with this token and attempt, ``-`` a failure, ``c`` the
    first confirmation that is awaited, ``b`` the same by a hold that was broken.
    """
    ballot, node, awaited = Ballot(nodes, ATTEMPT, range(nodes)), 0, []
    for answer in answers.split():
        if answer in {"c", "b"}:
            ballot.confirmed(awaited.pop(0), kept=answer == "c")
            continue
        if answer.isdigit():
            awaited += ballot.granted(node, int(answer))
        elif answer == "-":
            ballot.failed(node)
        else:
            ballot.refused(node, Refusal(float(answer[1:]), int(answer[1:]), int(answer[1:])))
        node += 1
    return ballot


@pytest.mark.parametrize(
    ("nodes", "answers", "verdict", "token"),
    [
        (3, "", OPEN, None),
        (3, "7", OPEN, None),
        (3, "7 7", WON, 7),
        (3, "7 9", OPEN, 9),
        (3, "7 9 c", WON, 9),
        (3, "7 9 b", OPEN, 9),
        (3, "7 9 b 9", WON, 9),
        (3, "7 9 b 11", REFUSED, 9),
        (3, "7 9 b -", REFUSED, 9),
        (3, "7 x9", OPEN, None),
        (3, "7 x9 7", WON, 7),
        (3, "7 x9 x9", REFUSED, None),
        (3, "x9 x9", REFUSED, None),
        (3, "x9 -", OPEN, None),
        (3, "x9 - x9", REFUSED, None),
        (3, "- -", UNAVAILABLE, None),
        (3, "7 - -", UNAVAILABLE, None),
        (3, "7 - x9", REFUSED, None),
        (4, "7 7", OPEN, None),
        (4, "7 7 7", WON, 7),
        (4, "7 7 x9 x9", REFUSED, None),
        (5, "5 6 7", OPEN, 7),
        (5, "5 6 7 c", OPEN, 7),
        (5, "5 6 7 c c", WON, 7),
        (5, "5 6 7 c 7", WON, 7),
        (5, "5 6 7 6 c c", WON, 7),
        (5, "- - 7 7 7", WON, 7),
        (5, "- - -", UNAVAILABLE, None),
    ],
)
def test_the_verdict_of_a_ballot(nodes: int, answers: str, verdict: BallotVerdict, token: int | None):
    ballot = ballot_of(answers, nodes=nodes)
    assert (ballot.verdict, ballot.token) == (verdict, token)


@pytest.mark.parametrize(
    ("nodes", "answers", "senior", "held"),
    [
        (4, "7 7 x60 x60", True, False),
        (4, "7 7 x40 x60", False, False),
        (4, "x60 x60 x60", False, True),
        (3, "7 x60 x60", False, True),
        (3, "7 x60 x61", True, False),
        (3, "x60 x61 -", False, False),
    ],
)
def test_the_senior_of_rivals_has_got_something_and_is_earlier_than_every_other(
    nodes: int, answers: str, senior: bool, held: bool
):
    ballot = ballot_of(answers, nodes=nodes)
    assert (ballot.senior, ballot.held) == (senior, held)


@pytest.mark.parametrize(
    ("nodes", "answers", "seconds"),
    [(3, "x9 x4 x6", 6.0), (3, "7 x4 x6", 4.0), (3, "x4 - -", None), (5, "x5 x1 x3 x2 x4", 3.0)],
)
def test_the_next_try_is_due_when_a_majority_may_be_free(nodes: int, answers: str, seconds: float | None):
    assert ballot_of(answers, nodes=nodes).retry_after() == seconds


# Renewals


def hold_on(*nodes: int) -> QuorumHold:
    hold = QuorumHold(Claim("a", 10.0), 7)
    for node in nodes:
        hold.settled(node, 7)
    return hold


@pytest.mark.parametrize(
    ("counted", "answers", "outcome"),
    [
        ((0, 1, 2), "11", HELD),
        ((0, 1, 2), "1", None),
        ((0, 1, 2), "1-1", HELD),
        ((0, 1, 2), "1--", None),
        ((0, 1, 2), "0-1", None),
        ((0, 1, 2), "00", Gone()),
        ((0, 1, 2), "1xx", Gone(taken=True)),
        ((0, 1, 2), "0n", Gone(taken=True)),
        ((0, 1), "101", None),
        ((0, 1), "110", HELD),
    ],
)
def test_the_outcome_of_a_keep(counted: tuple[int, ...], answers: str, outcome: Place | Gone | None):
    tally = KeepRound([hold_on(*counted)], 3)
    for node, code in enumerate(answers):
        if code == "-":
            tally.failed()
        else:
            tally.answer(node, code.encode())
    assert tally.outcomes == [outcome]
    assert tally.decided == (outcome is not None or len(answers) == 3)


def played(hold: QuorumHold, answers: str) -> KeepRound:
    tally = KeepRound([hold], 3)
    for node, code in enumerate(answers):
        tally.answer(node, code.encode())
    return tally


def test_a_round_that_fails_establishes_no_hold_and_heals_none():
    hold = hold_on(0, 1)
    hold.joined(2, 9)
    tally = played(hold, "1")
    for _ in range(2):
        tally.failed()
    assert not hold.counts(2)
    assert played(hold, "1n").to_heal(1) == []


def test_a_ticket_that_another_object_has_drawn_is_kept_by_its_owner_alone():
    tally = KeepRound([None], 3)
    tally.answer(0, b"1")
    tally.answer(1, b"1")
    assert tally.outcomes == [HELD]
