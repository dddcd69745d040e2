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

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Renewal, Revoked
from fencing_sdk._values.loop_owner import OneLoop
from fencing_sdk.abc import Backend, SupportsListing, SupportsRevoking, SupportsShares, SupportsTransfer
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
    Permits and readers, lists, revocations and transfers are passed on if *backend* has them; ``holders`` meets the
    faults of "inspect", and ``transfer`` those of "renew". Waiters of this backend poll: its line is not passed on, nor
    are loss notices.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._faults: dict[Operation, list[_CallFault]] = {operation: [] for operation in _OPERATIONS}
        self._stragglers: set[asyncio.Task[None]] = set()
        self._loop = OneLoop()
        self.calls: list[tuple[Operation, tuple[str, ...]]] = []
        # A power is what an object has, so these are attributes of the object and not of the class.
        for power in (SupportsListing, SupportsRevoking, SupportsSchema, SupportsInit):
            if isinstance(backend, power):
                vars(self).update({call: getattr(backend, call) for call in vars(power) if not call.startswith("_")})
        if isinstance(backend, SupportsShares):
            vars(self)["holders"] = partial(self._holders, backend)
        if isinstance(backend, SupportsTransfer):
            vars(self)["transfer"] = partial(self._transfer, backend)

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

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        return await self._pass("acquire", (claim.name,), lambda: self._backend.acquire(claim))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        names = tuple(claim.name for claim in claims)
        return await self._pass("renew", names, lambda: self._backend.renew(claims))

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        return await self._pass("release", (claim.name,), lambda: self._backend.release(claim))

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._pass("inspect", (name,), lambda: self._backend.inspect(name))

    async def _holders(self, backend: SupportsShares, name: str) -> Sequence[Holder]:
        return await self._pass("inspect", (name,), lambda: backend.holders(name))

    async def _transfer(self, backend: SupportsTransfer, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        return await self._pass("renew", (of.name,), lambda: backend.transfer(of, to))

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
