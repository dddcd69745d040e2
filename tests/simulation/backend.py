"""The client's end of the simulated service: a backend whose calls are messages, recorded as they are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from fencing_sdk.abc import ALL_MODES, Bell, Busy, Claim, Gone, Kept, Place, Seen
from fencing_sdk.testing._kernel import Link, Operation
from tests.simulation.service import NAME, Record, Service

T = TypeVar("T")


class Call:
    """One request on its way, and how often it was executed."""

    def __init__(self, record: Record, actor: str, number: int, operation: str) -> None:
        self._record = record
        self._actor = actor
        self._operation = operation
        self._number = number
        self._executions = 0

    def asked(self, claims: Sequence[Claim]) -> None:
        """Record that it was sent, a line for each claim."""
        for place, claim in enumerate(claims):
            fields = {"name": claim.name, "holder": claim.holder, "ttl": claim.ttl, "mode": claim.mode.word}
            self._record("asked", self._actor, call=f"{self._number}.{place}", operation=self._operation, **fields)

    def executed(self, claims: Sequence[Claim]) -> None:
        """Record an execution besides the first: the network delivered the request twice."""
        self._executions += 1
        if self._executions > 1:
            for place in range(len(claims)):
                self._record("repeated", self._actor, call=f"{self._number}.{place}")

    def answered(self, place: int, outcome: str, token: int | None = None) -> None:
        """Record the answer for one claim."""
        self._record("answered", self._actor, call=f"{self._number}.{place}", outcome=outcome, token=token)


class SimulatedBackend:
    """Its requests, answers and bells are messages."""

    modes = ALL_MODES

    def __init__(
        self, link: Link, service: Service, record: Record, actor: str, numbers: Iterator[int], rings: bool
    ) -> None:
        self.rings = rings
        self.link = link
        self.service = service
        self._record = record
        self._actor = actor
        self._numbers = numbers

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        call = self._call("acquire", (claim,))
        serve = partial(self.service.draw, claim, only_if_it_holds=only_if_it_holds)
        answer = await self._ask(call, "acquire", (claim,), serve)
        token = answer.token if isinstance(answer, Place) else None
        call.answered(0, "held" if token is None else "granted", token)
        return answer

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        """See `fencing_sdk.abc.Backend.keep`."""
        claims = tuple(claim for claim, _ in tickets)
        call = self._call("renew", claims)
        answers = await self._ask(call, "renew", claims, lambda: self.service.keep(tuple(tickets)))
        for place, answer in enumerate(answers):
            renewed = isinstance(answer, Place) and answer.token is not None
            call.answered(place, "renewed" if renewed else "refused")
        return answers

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        call = self._call("release", (claim,))
        answer = await self._ask(call, "release", (claim,), lambda: self.service.give_back(claim, after))
        call.answered(0, "done")
        return answer

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        return await self.link.ask(NAME, "inspect", name, lambda _: self.service.lines.end(name, token, reason))

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        return await self.link.ask(NAME, "inspect", ", ".join(names), lambda _: [*map(self.service.tickets, names)])

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        return await self.link.ask(NAME, "inspect", prefix, lambda _: self.service.lines.names(prefix, cursor, limit))

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self.service.listen(claim.owner, lambda news: self.link.push(NAME, "bell", claim.name, bell, news))

    async def aclose(self) -> None:
        """Nothing is open."""

    def _call(self, operation: str, claims: Sequence[Claim]) -> Call:
        call = Call(self._record, self._actor, next(self._numbers), operation)
        call.asked(claims)
        return call

    async def _ask(self, call: Call, operation: Operation, claims: Sequence[Claim], serve: Callable[[], T]) -> T:
        def handle(_client: str) -> T:
            call.executed(claims)
            return serve()

        return await self.link.ask(NAME, operation, ", ".join(claim.name for claim in claims), handle)


def numbers() -> Iterator[int]:
    """Numbers for the calls of one history."""
    return itertools.count(1)
