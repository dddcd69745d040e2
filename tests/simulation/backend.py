"""The client's end of the simulated service: a backend whose calls are messages, recorded as they are made."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from fencing_sdk.abc import Busy, Claim, Grant, Holder, LossNotice, Renewal, Revoked, WaiterNotice
from fencing_sdk.backends._shared.losses import LossNotices
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn
from fencing_sdk.errors import BackendUnavailableError, LossReason
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
    """Waiters of this one poll: it has no line."""

    def __init__(self, link: Link, service: Service, record: Record, actor: str, numbers: Iterator[int]) -> None:
        self.link = link
        self.service = service
        self._record = record
        self._actor = actor
        self._numbers = numbers
        self._loss_notices = LossNotices()

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        call = self._call("acquire", (claim,))
        answer = await self._ask(call, "acquire", (claim,), lambda: self.service.acquire(claim, self._push_notice))
        granted = isinstance(answer, Grant)
        call.answered(0, "granted" if granted else "held", answer.token if isinstance(answer, Grant) else None)
        return answer

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        call = self._call("renew", claims)
        answers = await self._ask(call, "renew", claims, lambda: [self.service.renew(claim) for claim in claims])
        for place, answer in enumerate(answers):
            call.answered(place, "renewed" if answer is Renewal.RENEWED else "refused")
        return answers

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        call = self._call("release", (claim,))
        answer = await self._ask(call, "release", (claim,), lambda: self.service.release(claim))
        call.answered(0, "done")
        return answer

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self.link.ask(NAME, "inspect", name, lambda _: self.service.inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return await self.link.ask(NAME, "inspect", name, lambda _: self.service.holders(name))

    async def aclose(self) -> None:
        """Nothing is open."""

    def on_loss(self, notice: LossNotice) -> Callable[[], object]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._loss_notices.on_loss(notice)

    def _push_notice(self, claim: Claim) -> None:
        self.link.push(NAME, "notice", claim.name, self._noticed, claim)

    def _noticed(self, claim: Claim) -> None:
        self._loss_notices.notify(claim, LossReason.REVOKED)

    def _call(self, operation: str, claims: Sequence[Claim]) -> Call:
        call = Call(self._record, self._actor, next(self._numbers), operation)
        call.asked(claims)
        return call

    async def _ask(self, call: Call, operation: Operation, claims: Sequence[Claim], serve: Callable[[], T]) -> T:
        def handle(_client: str) -> T:
            call.executed(claims)
            return serve()

        return await self.link.ask(NAME, operation, ", ".join(claim.name for claim in claims), handle)


class QueueingBackend(SimulatedBackend):
    """One with a line, whose head is woken by a message that may get lost."""

    def __init__(self, link: Link, service: Service, record: Record, actor: str, numbers: Iterator[int]) -> None:
        super().__init__(link, service, record, actor, numbers)
        self._places = KeptPlaces()

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        place = _Place()

        def waker(what: str) -> None:
            self.link.push(NAME, what, claim.name, place.hear, what)

        try:
            await asyncio.wait_for(
                self.link.ask(NAME, "inspect", f"line of {claim.name}", lambda _: self.service.join(claim, waker)), 1.0
            )
            yield place
        except TimeoutError:
            backend, operation = type(self).__name__, "queue"
            raise BackendUnavailableError(backend, operation, "no answer") from None
        finally:
            self.link.send(NAME, "leave", claim.name, lambda _: self.service.leave(claim))


class _Place:
    """A place in the line, as far as its holder knows."""

    def __init__(self) -> None:
        self._heard = asyncio.Event()
        self._broken = False

    def hear(self, what: str) -> None:
        """Take a message of the service."""
        self._broken |= what == "broken"
        self._heard.set()

    async def wait(self) -> None:
        """See `Turn.wait`."""
        await self._heard.wait()
        self._heard.clear()
        if self._broken:
            backend, operation = "QueueingBackend", "queue"
            raise BackendUnavailableError(backend, operation, "the connection broke")


def numbers() -> Iterator[int]:
    """Numbers for the calls of one history."""
    return itertools.count(1)
