"""The Kahuna backend keeps the contract, on a stand-in or, behind it, on a real Kahuna."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from kahuna_server import KahunaServer
from own_server import OwnServer

from fencing_sdk.abc import Busy, Claim, Gone, Kept, Place, Seen
from fencing_sdk.backends.kahuna import KahunaBackend, from_url
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing import BackendSuite, Comparison

pytest_plugins = ["kahuna_fixtures"]

T = TypeVar("T")

HISTORIES = 25


class TestKahuna(OwnServer, BackendSuite):
    lines = shares = False
    ttl = 0.5
    expiry_lag = 0.05
    resolution = 0.02
    test_names_come_in_pages = None  # Kahuna does not list its locks
    test_it_answers_as_the_rules = None  # below, without what it cannot do

    @pytest.fixture(autouse=True)
    def server(self, kahuna_server: KahunaServer) -> KahunaServer:
        self.own_server = kahuna_server
        return kahuna_server

    @pytest.fixture(autouse=True)
    def unhurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thousand keeps may take long: the machine is slow."""
        monkeypatch.setattr("fencing_sdk.backends.kahuna._KEEP_PART", 10.0)

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], KahunaBackend]:
        return lambda: from_url(url, connect_timeout=self.patience)  # a busy machine accepts connections late


class OfAnyTicket(Comparison):
    """An operator's reason is kept although its owner draws again, which a client never does."""

    def _equal(self, theirs: Any, ours: Any) -> None:
        if isinstance(theirs, Gone) and theirs.reason == "why":
            ours = ours._replace(reason="why")
        super()._equal(theirs, ours)


@pytest.mark.parametrize(
    "played",
    [
        ("try", "try", "try", "keep", "keep", "give", "give", "look"),
        ("try", "try", "try", "keep", "keep", "give", "park"),  # the rules show another owner for what is parked
        ("try", "try", "try", "keep", "keep", "give", "end", "look"),
    ],
)
async def test_answers_are_those_of_the_rules(kahuna_server: KahunaServer, played: Sequence[str]):
    kahuna_server.replication(0)
    stores = [from_url(kahuna_server.url) for _ in range(2)]
    for seed in range(HISTORIES):
        await OfAnyTicket(stores, seed, verbs=played, modes=("lock",)).play()
    for store in stores:
        await store.aclose()


async def _gone_to_no_other(self: KahunaBackend, claim: Claim, *, taken: bool) -> Gone:
    return Gone()


@pytest.mark.parametrize(
    ("where", "planted"),
    [
        ("KahunaBackend._gone", _gone_to_no_other),
        ("_place_in", lambda answer, operation: Place(7, None, 8)),
        ("KnownTickets.is_parked", lambda known, owner: False),
    ],
)
async def test_a_planted_fault_is_caught(
    kahuna_server: KahunaServer, monkeypatch: pytest.MonkeyPatch, where: str, planted: Callable[..., object]
):
    """The control of the comparison."""
    monkeypatch.setattr(f"fencing_sdk.backends.kahuna.{where}", planted)
    async with contextlib.aclosing(from_url(kahuna_server.url)) as store:
        with pytest.raises(AssertionError):
            for seed in range(HISTORIES):
                await Comparison([store], seed, verbs=("try", "try", "keep", "give", "park"), modes=("lock",)).play()


class Persevering:
    """What the engine does with an outcome that is not known: it asks again, with the same claim."""

    modes, rings = KahunaBackend.modes, KahunaBackend.rings

    def __init__(self, backend: KahunaBackend) -> None:
        self._backend = backend
        self.names, self.listen, self.aclose = backend.names, backend.listen, backend.aclose

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        return await self._again(lambda: self._backend.draw(claim, only_if_it_holds=only_if_it_holds))

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        answers = list(await self._again(lambda: self._backend.keep(tickets)))
        while open_ones := [index for index, answer in enumerate(answers) if answer is None]:
            again = await self._again(lambda: self._backend.keep([tickets[index] for index in open_ones]))
            for index, answer in zip(open_ones, again, strict=True):
                answers[index] = answer
        return answers

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """A refusal of a repeated give-back is not a loss: an earlier one may have ended the ticket."""
        tries = 0

        async def give_back_once() -> Gone | None:
            nonlocal tries
            tries += 1
            gone = await self._backend.give_back(claim, after=after)
            return gone if tries == 1 else None

        return await self._again(give_back_once)

    async def end(self, name: str, token: int, reason: str) -> bool:
        return await self._again(lambda: self._backend.end(name, token, reason))

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        return await self._again(lambda: self._backend.tickets(names))

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        for _ in range(15):
            try:
                return await call()
            except BackendUnavailableError:
                await asyncio.sleep(0.005)
        return await call()


class TestKahunaThroughFaults(TestKahuna):
    """
    Every fifth request meets trouble, before or after it is carried out; no promise is broken by it.

    Left out is what a give-back or an end answers, because that is not known where the request was sent twice; when a
    held lock will be free, and why a ticket was ended, because these questions are not repeated for long; and what
    takes a thousand requests.
    """

    test_a_thousand_are_kept_in_one_call = None
    test_a_give_back_again = None
    test_a_give_back_after_the_death = None
    test_a_give_back_of_nothing = None
    test_a_block_whose_ticket_has_gone_ends_with_the_loss = None
    test_an_end_has_a_reason = None
    test_no_two_names_are_one = None
    test_processes_count_exactly = None
    test_an_end_of_another_token = None
    test_the_moment_to_look = None

    @pytest.fixture(autouse=True)
    def server(self, kahuna_server: KahunaServer) -> KahunaServer:
        kahuna_server.chaos(0.2, spared="fencing-sdk/open")  # opening a client is one request, and may fail
        self.own_server = kahuna_server
        return kahuna_server

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], Persevering]:
        return lambda: Persevering(from_url(url))
