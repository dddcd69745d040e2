"""
A backend with a bad network in front of it.

Each operation has a list of faults. The first one meets the next calls, until its ``times`` are
used up. It may hold the request back, lose it, deliver it twice, lose the answer after the request
was applied, or hang without reacting to cancellation. The caller learns of a loss at once, as by a connection that
breaks, or never, as by a network that swallows packets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, get_args

import anyio

from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.loop_owner import OneLoop
from fencing_sdk.abc import Backend, Bell, Kept, PassesOn
from fencing_sdk.abc._powers import SupportsInit, SupportsSchema
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError, shown

T = TypeVar("T")

Operation = Literal["acquire", "renew", "release", "inspect"]
_OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(slots=True)
class _CallFault:
    """Something that happens to the next calls of one operation."""

    before: float = 0.0
    error: Exception | None = None
    lost: bool = False
    lose_reply: bool = False
    silent: bool = False
    again: float | None = None
    straggle: float | None = None
    hang: float | None = None
    heeds_cancellation: bool = True
    times: int | None = None


class FaultyBackend:
    """
    Passes calls on to *backend*, unless a fault is set for their operation.

    ``calls`` lists every call with the names it was about, in order, whether it succeeded or failed.
    Without *bells* none is passed on, as by a connection that breaks each time.
    """

    def __init__(self, backend: Backend, *, bells: bool = True) -> None:
        self._backend = backend
        self._bells = bells
        self._faults: dict[Operation, list[_CallFault]] = {operation: [] for operation in _OPERATIONS}
        self._stragglers: set[asyncio.Task[None]] = set()
        self._loop = OneLoop()
        self.calls: list[tuple[Operation, tuple[str, ...]]] = []
        # A power is what an object has, so these are attributes of the object and not of the class.
        for power in (SupportsSchema, SupportsInit):
            if isinstance(backend, power):
                vars(self).update({call: getattr(backend, call) for call in vars(power) if not call.startswith("_")})
        if isinstance(backend, PassesOn):
            vars(self)["pass_on"] = partial(self._pass_on, backend)
        self.modes, self.rings = backend.modes, backend.rings

    def delay(self, operation: Operation, seconds: float, *, times: int | None = None) -> None:
        """Deliver the requests *seconds* later."""
        self._add(operation, _CallFault(before=seconds, times=times))

    def fail(self, operation: Operation, error: Exception | None = None, *, times: int | None = None) -> None:
        """Lose the requests: nothing is applied, and *error* (by default "unavailable") comes back."""
        self._add(operation, _CallFault(lost=True, error=error, times=times))

    def drop(self, operation: Operation, *, times: int | None = None) -> None:
        """Lose the requests silently: nothing is applied, and the caller waits until it gives up."""
        self._add(operation, _CallFault(lost=True, silent=True, times=times))

    def lose_reply(self, operation: Operation, *, times: int | None = None, silent: bool = False) -> None:
        """Apply the requests and lose the answers: "unavailable" comes back, or with *silent* nothing ever."""
        self._add(operation, _CallFault(lose_reply=True, silent=silent, times=times))

    def duplicate(self, operation: Operation, seconds: float = 0.0, *, times: int | None = None) -> None:
        """Answer the requests as usual, and apply each of them once more *seconds* later."""
        self._add(operation, _CallFault(again=seconds, times=times))

    def straggle(self, operation: Operation, seconds: float, *, times: int | None = None) -> None:
        """Raise "unavailable" at once, and apply the requests *seconds* later, when the caller has given up."""
        self._add(operation, _CallFault(straggle=seconds, times=times))

    def hang(
        self, operation: Operation, seconds: float = 3600.0, *, times: int | None = None, stubborn: bool = False
    ) -> None:
        """Do nothing for *seconds*, then apply; a *stubborn* call does not even react to its cancellation."""
        self._add(operation, _CallFault(hang=seconds, heeds_cancellation=not stubborn, times=times))

    def heal(self, operation: Operation | None = None) -> None:
        """Remove every fault, or those of one *operation*."""
        for healed in _OPERATIONS if operation is None else (_check_operation(operation),):
            self._faults[healed].clear()

    async def delivered(self) -> None:
        """Wait until every request that straggles, and every copy, has arrived."""
        while self._stragglers:
            await asyncio.wait(self._stragglers)

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        draw = partial(self._backend.draw, claim, only_if_it_holds=only_if_it_holds)
        return await self._pass("acquire", (claim.name,), draw)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`."""
        names = tuple(claim.name for claim, _ in tickets)
        return await self._pass("renew", names, lambda: self._backend.keep(tickets))

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        return await self._pass("release", (claim.name,), lambda: self._backend.give_back(claim, after=after))

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        return await self._pass("inspect", tuple(names), lambda: self._backend.tickets(names))

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        return await self._backend.names(prefix, cursor, limit)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        return await self._backend.end(name, token, reason)

    async def _pass_on(self, backend: PassesOn, claim: Claim, heir: Claim) -> Place | Gone:
        return await self._pass("renew", (claim.name,), lambda: backend.pass_on(claim, heir))

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._backend.listen(claim, bell if self._bells else _deaf)

    async def aclose(self) -> None:
        """Close the backend behind. What straggles is on its way already and still arrives."""
        self._loop.forget()
        await self._backend.aclose()

    def _add(self, operation: Operation, fault: _CallFault) -> None:
        if fault.times is not None and fault.times < 1:
            msg = f"times must be at least 1, or None for every call, got {shown(fault.times)}"
            raise ConfigurationError(msg)
        self._faults[_check_operation(operation)].append(fault)

    async def _pass(self, operation: Operation, names: tuple[str, ...], call: Callable[[], Awaitable[T]]) -> T:
        self._loop.check(self)
        self.calls.append((operation, names))
        fault = self._next_fault(operation)
        if fault is None:
            return await call()
        if fault.hang is None:
            await anyio.sleep(fault.before)
        else:
            await _hang(fault.hang, heeds_cancellation=fault.heeds_cancellation)
        if fault.again is not None:
            self._send_late(fault.again, call)  # it has left: giving up the first one does not stop it
        if fault.straggle is not None:
            self._send_late(fault.straggle, call)
        elif not fault.lost:
            answer = await call()
            if not fault.lose_reply:
                return answer
        if fault.silent:
            await asyncio.get_running_loop().create_future()
        if fault.error is not None:
            raise fault.error.with_traceback(None)
        raise BackendUnavailableError(type(self).__name__, operation, "by request of a test")

    def _send_late(self, seconds: float, call: Callable[[], Awaitable[object]]) -> None:
        async def late() -> None:
            await asyncio.sleep(seconds)
            await call()

        straggler = asyncio.get_running_loop().create_task(late())
        self._stragglers.add(straggler)
        straggler.add_done_callback(self._arrived)

    def _arrived(self, straggler: asyncio.Task[None]) -> None:
        self._stragglers.discard(straggler)
        if not straggler.cancelled():
            straggler.exception()  # retrieved, or asyncio would log it: no caller waits for this answer

    def _next_fault(self, operation: Operation) -> _CallFault | None:
        faults = self._faults[operation]
        if not faults:
            return None
        fault = faults[0]
        if fault.times is not None:
            fault.times -= 1
            if fault.times == 0:
                faults.pop(0)
        return fault


def _check_operation(operation: Operation) -> Operation:
    """Refuse a misspelt operation: its fault would never happen, and the test would show nothing."""
    if operation not in _OPERATIONS:
        msg = f"operation must be one of {', '.join(_OPERATIONS)}, got {shown(operation)}"
        raise ConfigurationError(msg)
    return operation


async def _hang(seconds: float, *, heeds_cancellation: bool) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            if heeds_cancellation:
                raise


def _deaf(_: object) -> None:
    """Hear nothing."""
