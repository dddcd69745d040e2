"""The client's end of a line that hands the lock over: signs of life once a second, and grants that come unasked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextvars import Context

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk.abc import Tell
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing._network import Link
from tests.simulation.backend import SimulatedBackend
from tests.simulation.service import NAME, Service, Sign
from tests.simulation.service import Tell as Record

_EVERY = 1.0
_ANSWER_LIMIT = 0.9


class Waiter:
    """A waiter in the line, as far as its client knows."""

    def __init__(self, backend: HandingBackend, claim: Claim, tell: Tell) -> None:
        self._backend = backend
        self.claim = claim
        self.tell = tell
        self.joined = self.served = False
        self.call = backend._call("acquire", (claim,))  # to stand in the line is one call, answered by the grant

    def nap(self, _advice: float) -> float | None:
        """See `fencing_sdk.abc.PlaceInLine.nap`."""
        return 60.0 if self.joined else None

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._backend.waiters.pop(self.claim.owner, None)


class HandingBackend(SimulatedBackend):
    """Its waiters are told on which sign of life a grant was made: the grant counts from that sign."""

    def __init__(self, link: Link, service: Service, tell: Record, actor: str, numbers: Iterator[int]) -> None:
        super().__init__(link, service, tell, actor, numbers)
        self.waiters: dict[str, Waiter] = {}
        self._signs = itertools.count(1)
        self._sent: dict[int, float] = {}
        self._answered = 0
        self._served: dict[str, int] = {}  # owner -> the token with which it went on
        self._due = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def stand(self, claim: Claim, tell: Tell) -> Waiter:
        """See `fencing_sdk.abc.SupportsDirectGrant.stand`."""
        waiter = self.waiters[claim.owner] = Waiter(self, claim, tell)
        self._due.set()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), context=Context())
        return waiter

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        answer = await super().acquire(claim)
        if isinstance(answer, Grant) and claim.owner in self.waiters:
            self._served[claim.owner] = answer.token
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
                    waiter.tell()
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
                self.give_back(claim)
        elif grant is None:
            waiter.tell()
        else:
            self._served[claim.owner] = grant.token
            if not waiter.served:
                waiter.served = True
                waiter.call.answered(0, "granted", grant.token)
            waiter.tell(grant, self.age(number))

    def is_newer(self, grant: Grant, token: int) -> bool:
        """Whether *grant* came after the one with *token*. The message of an older one was late: that grant is over."""
        return grant.token > token

    def give_back(self, claim: Claim) -> None:
        """Release a grant for a waiter that has left, or was granted by another message before."""
        self.link.send(NAME, "release", claim.name, lambda _: self.service.release(claim))

    def age(self, number: int) -> float:
        """Seconds since sign *number* was sent."""
        return self.now() - self._sent[number]

    def now(self) -> float:
        """The clock of the process."""
        return self.link._process.clock.now()
