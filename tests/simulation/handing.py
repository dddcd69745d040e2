"""The client's end of a line that hands the lock over: signs of life once a second, and grants that come unasked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextvars import Context

from fencing_sdk.abc import Busy, Claim, Grant, PlaceInLine, WaiterNotice
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing._kernel import Link
from tests.simulation.backend import Call, SimulatedBackend
from tests.simulation.service import NAME, Record, Service, Sign

_EVERY = 1.0
_ANSWER_LIMIT = 0.9


class Waiter(PlaceInLine):
    """A waiter in the line, as far as its client knows."""

    hands_over = True

    def __init__(self, backend: HandingBackend, claim: Claim, notify: WaiterNotice) -> None:
        self._backend = backend
        self.claim = claim
        self.notify = notify
        self.joined = False
        self.served = -1
        """The token of the last hand-over."""
        self.call: Call | None = None
        self.ask()

    def ask(self) -> None:
        """Record that the claim stands in the line: one call, which a hand-over answers."""
        self.call = self._backend._call("acquire", (self.claim,))

    def answered(self, outcome: str, token: int | None = None) -> None:
        """Record what became of standing in the line, once."""
        if self.call is not None:
            self.call.answered(0, outcome, token)
        self.call = None

    def retry_after(self, _advice: float) -> float | None:
        """See `fencing_sdk.abc.PlaceInLine.retry_after`."""
        return 60.0 if self.joined else None

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._backend.waiters.pop(self.claim.owner, None)


class NoPlace(PlaceInLine):
    """That of a waiter that cannot be handed the lock: it polls."""

    def retry_after(self, _advice: float) -> None:
        """See `fencing_sdk.abc.PlaceInLine.retry_after`."""

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""


class HandingBackend(SimulatedBackend):
    """Its waiters are told on which sign of life a grant was made: the grant counts from that sign."""

    def __init__(self, link: Link, service: Service, record: Record, actor: str, numbers: Iterator[int]) -> None:
        super().__init__(link, service, record, actor, numbers)
        self.waiters: dict[str, Waiter] = {}
        self._signs = itertools.count(1)
        self._sent: dict[int, float] = {}
        self._answered = 0
        self._served: dict[str, int] = {}  # owner -> the token with which it went on
        self._due = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> Waiter | NoPlace:
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        if not hand_over:
            return NoPlace()
        waiter = self.waiters[claim.owner] = Waiter(self, claim, notify)
        self._due.set()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), context=Context())
        return waiter

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        waiter = self.waiters.get(claim.owner)
        stands_again = waiter is not None and waiter.served >= 0
        if waiter is not None and stands_again:
            waiter.ask()  # a hand-over that came too late leaves it in the line, and may be followed by another
        answer = await super().acquire(claim)
        if waiter is not None and isinstance(answer, Grant):
            self._served[claim.owner] = answer.token
            if stands_again:
                waiter.answered("held")
        return answer

    async def aclose(self) -> None:
        """End the signs of life."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        """Give a sign of life for all waiters at once, every second, and at once for one that has come."""
        while self.waiters:
            self._due.clear()
            waiters = tuple(self.waiters.values())
            try:
                await asyncio.wait_for(self._give_signs(waiters), _ANSWER_LIMIT)
            except (TimeoutError, BackendUnavailableError):
                for waiter in waiters:
                    waiter.joined = False
                    waiter.notify()
            try:
                await asyncio.wait_for(self._due.wait(), _EVERY)
            except TimeoutError:
                continue

    async def _give_signs(self, waiters: tuple[Waiter, ...]) -> None:
        number = next(self._signs)
        self._sent[number] = self.now()
        signs = [Sign(waiter.claim, self._actor, number, 0.0, self._push, self._push_notice) for waiter in waiters]
        grants = await self.link.ask(
            NAME, "acquire", "signs of life", lambda _: [self.service.sign(sign) for sign in signs]
        )
        self._answered = max(self._answered, number)
        for waiter, grant in zip(waiters, grants, strict=True):
            waiter.joined = True
            if grant is not None:
                self.handed(waiter.claim, number, grant)

    def _push(self, claim: Claim, number: int, grant: Grant | None) -> None:
        """Sent by the service."""
        self.link.push(NAME, "acquire", f"hand over {claim.name}", self.handed, claim, number, grant)

    def handed(self, claim: Claim, number: int, grant: Grant | None) -> None:
        """Take a message: it counts from the sign that it names, wherever it has been since then."""
        waiter = self.waiters.get(claim.owner)
        if waiter is None:
            if grant is not None and self.is_newer(grant, self._served.get(claim.owner, -1)):
                self.release_late(claim)
        elif grant is None:
            waiter.notify()
        else:
            self._served[claim.owner] = grant.token
            if grant.token > waiter.served:
                waiter.served = grant.token
                waiter.answered("granted", grant.token)
            waiter.notify(grant, self.age(number))

    def is_newer(self, grant: Grant, token: int) -> bool:
        """Whether *grant* came after the one with *token*. The message of an older one was late: that grant is over."""
        return grant.token > token

    def release_late(self, claim: Claim) -> None:
        """Release a grant for a waiter that has left, or was granted by another message before."""
        self.link.send(NAME, "release", claim.name, lambda _: self.service.release(claim))

    def age(self, number: int) -> float:
        """Seconds since sign *number* was sent."""
        return self.now() - self._sent[number]

    def now(self) -> float:
        """The clock of the process."""
        return self.link._process.clock.now()
