"""
The stages that the promises are played on: what a subclass declares, provides and may replace.

No promise is tested here. A power that a backend or a guard does not have is declared as a class attribute;
the promises about it are then not collected, instead of skipped or passed without looking:

    class GuardUnderTest:
        several: bool = False          # a subclass declares what it has

        @needs("several")
        async def test_all_or_nothing(self, guard): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import pytest

from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.timing import MIN_TTL
from fencing_sdk._values.token import TOKEN_LIMIT, Token
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import StaleTokenError

F = TypeVar("F", bound=Callable[..., object])


def needs(*powers: str) -> Callable[[F], F]:
    """Collect a promise, or every promise of a class, only for a suite that declares all of these *powers*."""

    def mark(promise: F) -> F:
        for one in vars(promise).values() if isinstance(promise, type) else (promise,):
            if getattr(one, "__name__", "").startswith("test_"):
                one.__dict__["powers"] = (*powers, *getattr(one, "powers", ()))
        return promise

    return mark


def collect_by_power(suite: type) -> None:
    """Hide the promises whose powers *suite* does not declare, and show those whose powers it declares again."""
    for name, promise in _promises_with_powers(suite).items():
        if name not in vars(suite):  # where it is defined it stays, for other subclasses; so does what hides it
            setattr(suite, name, promise if all(getattr(suite, power) for power in promise.powers) else None)


def _promises_with_powers(suite: type) -> dict[str, Any]:
    """The promises that need declared powers, as first defined, even if a subclass replaced them."""
    found: dict[str, Any] = {}
    for parent in reversed(suite.__mro__):
        found |= {name: value for name, value in vars(parent).items() if getattr(value, "powers", None)}
    return found


NAME = "invoices/42"
LONG = 30.0
"""Seconds: a ttl that does not end during a test."""
DRIFT = 0.01
TRIES = 5

Reopen = Callable[[], Backend]
"""Makes another backend object on the store of the fixture ``backend``."""


class BackendUnderTest:
    """
    Facts that `fencing_sdk.testing.BackendSuite` knows about the backend under test.

    The defaults declare a store with lines and every mode, that outlives its clients and is shared between processes.
    A subclass declares where its store does less, or more.
    """

    ttl: float = 1.0
    """Seconds of the tickets that are waited for until they die; at least the store's minimum."""

    minimum_ttl: float = MIN_TTL
    """Seconds to which the store rounds shorter ttls up."""

    expiry_lag: float = 0.1
    """Seconds, beyond the ttl and 1 % of drift, after which a dead ticket is really gone."""

    resolution: float = 0.01
    """Seconds by which the store may read its clock too coarsely, so that a ticket dies too early."""

    patience: float = 60.0
    """Seconds after which a promise that waits for something is broken: far more than a busy machine needs."""

    bell_lag: float = 0.0
    """Seconds after a draw from which its bell is surely heard."""

    histories: int = 30
    """Random histories that are compared with the rules."""

    lines: bool = True
    """Tickets wait in lines, and bells ring: `Backend.rings`."""

    shares: bool = True
    """Several owners may hold one name, as permits or as readers: `Backend.modes`."""

    passes_on: bool = False
    """A ticket changes hands in one step: the backend is a `PassesOn`."""

    redraws: bool = True
    """An owner may draw again while a ticket stays that it has given back for later. No client does."""

    ends: bool = True
    """An operator can end a ticket: `Backend.end`."""

    processes: bool = True
    """Several processes share the store. Needs the fixture ``url``."""

    breakable: bool = True
    """The store may be out of reach. Needs `break_store`."""

    survives_restart: bool = True
    """Tickets outlive a restart of the store. Tokens always do, see `restart`."""

    keeps_alone: bool = True
    """The store alone keeps a ticket that is given back later, although the client has gone."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        collect_by_power(cls)

    # What a subclass provides.

    @pytest.fixture
    def backend(self) -> Backend:
        """A backend on a fresh, empty store."""
        pytest.fail("provide a fixture 'backend': a backend object on an empty store")

    @pytest.fixture
    def reopen(self) -> Reopen:
        """Return a callable that makes another backend object on the store of ``backend``."""
        pytest.fail("provide a fixture 'reopen': a callable that makes another object on the same store")

    @pytest.fixture
    def url(self) -> str:
        """The URL of the store of ``backend``, for other processes."""
        pytest.fail("declare processes = False, or provide a fixture 'url'")

    def break_store(self, backend: Backend) -> AbstractAsyncContextManager[object]:
        """Put the store out of reach of *backend* for the duration of a context."""
        pytest.fail(f"declare breakable = False, or provide break_store() for {type(backend).__name__}")

    # What a subclass may replace.

    def now(self) -> float:
        """Seconds on a clock that runs like the store's."""
        return BootClock().now()

    async def pass_time(self, seconds: float) -> None:
        """Let *seconds* pass for the store. Replace it, and `now`, where its clock can be set."""
        await asyncio.sleep(seconds)

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the store as far as a test can, and return a backend on it."""
        await backend.aclose()
        return reopen()

    async def purge(self, backend: Backend) -> None:
        """Run the store's clean-up of what is no longer needed, where it has one."""

    # What the promises are written with.

    def claim(self, name: str = NAME, *, ttl: float = 60.0, label: str | None = None) -> Claim:
        """Make a new claim, by default with a ttl that does not end during a test."""
        return Claim(name, ttl, label=label)

    async def granted(self, backend: Backend, claim: Claim) -> int:
        """Draw for *claim*, which must hold at once; return the token."""
        place = await backend.draw(claim, only_if_it_holds=True)
        assert isinstance(place, Place), f"{claim.name!r} is held: {place}"
        token: object = place.token
        assert isinstance(token, int)
        assert not isinstance(token, bool)
        assert 0 <= token < TOKEN_LIMIT
        return token

    async def refused(self, backend: Backend, claim: Claim) -> Busy:
        """Try to draw for *claim*, which must be refused."""
        outcome = await backend.draw(claim, only_if_it_holds=True)
        assert isinstance(outcome, Busy), f"expected a refusal of {claim.name!r}, got {outcome}"
        return outcome

    async def kept(self, backend: Backend, claim: Claim) -> Place | Gone | None:
        """Keep one ticket; return its answer."""
        (answer,) = await backend.keep([(claim, 0)])
        return answer

    async def seen(self, backend: Backend, name: str = NAME) -> Sequence[Seen]:
        """Return the tickets of *name*."""
        (seen,) = await backend.tickets([name])
        return seen

    def assert_rising(self, tokens: list[int]) -> None:
        """Every token is higher than the one before."""
        assert tokens == sorted(set(tokens)), "tokens did not rise"

    async def expire(self, ttl: float) -> None:
        """Let so much time pass that a ticket of *ttl* seconds has died."""
        await self.pass_time(self.ended_after(ttl))

    def ended_after(self, ttl: float) -> float:
        """Seconds after the answer to a sign of life by which a ticket of *ttl* seconds must have died."""
        return ttl * (1 + DRIFT) + self.expiry_lag

    def lasted_until(self, sent_at: float, ttl: float) -> float:
        """The moment before which a ticket of *ttl* seconds, whose owner asked at *sent_at*, must not die."""
        return sent_at + ttl * (1 - DRIFT) - self.resolution

    async def freed(self, backend: Backend, claim: Claim, *, by: float) -> float:
        """Try to draw for *claim* until it holds; return when. A try after the moment *by* must succeed."""
        while True:
            tried_at = self.now()
            if isinstance(outcome := await backend.draw(claim, only_if_it_holds=True), Place):
                return self.now()
            assert tried_at <= by, f"{claim.name!r} was still refused {tried_at - by:.3g} s too late: {outcome}"
            await self.pass_time(min(self.ttl, 1.0) / 20)

    async def freed_soon(self, backend: Backend, claim: Claim) -> int:
        """Try to draw for *claim* until it holds, at most for `patience`; return the token."""
        async with self.soon():
            while True:
                if isinstance(outcome := await backend.draw(claim, only_if_it_holds=True), Place):
                    return outcome.token or 0
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def soon(self) -> AsyncIterator[None]:
        """Fail when the body takes longer than `patience`."""
        limit = asyncio.timeout(self.patience)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            pytest.fail(f"waited in vain for {self.patience} s")


RESOURCE = "invoices/42"
OLD = Token(33, "aaaaaaaa")
NEW = Token(34, "bbbbbbbb")
CONFLICTING = Token(34, "cccccccc")
"""The same number, given to another holder."""


class GuardUnderTest:
    """
    Facts that `fencing_sdk.testing.GuardSuite` knows about the guard under test.

    A subclass provides the fixture ``guard`` (on fresh resources) and the adapters `write`, `read`
    and `reopen`. Values are short texts.
    """

    durable: bool = True
    """The fences outlive the guard object, and are shared by all that are opened on the same resources."""

    several: bool = False
    """Several resources can be written in one step. Needs `write_all`."""

    patience: float = 60.0
    """Seconds after which a promise that waits for something is broken."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        collect_by_power(cls)

    # What a subclass provides.

    @pytest.fixture
    def guard(self) -> Guard:
        """A guard whose resources were never written to."""
        pytest.fail("provide a fixture 'guard': a guard on fresh resources")

    async def write(self, guard: Any, resource: str, token: int, value: str) -> None:
        """Write *value* with *token* as a user of *guard* would, check and write being one step."""
        pytest.fail(f"provide write() for {type(guard).__name__}: {resource}, {token}, {value}")

    async def write_all(self, guard: Any, tokens: Mapping[str, int], values: Mapping[str, str]) -> None:
        """Write the value of each resource with its token, all of it being one step."""
        pytest.fail(f"declare several = False, or provide write_all() for {type(guard).__name__}: {tokens}, {values}")

    async def read(self, guard: Any, resource: str) -> str | None:
        """Read the value that was written last, or None when there is none."""
        pytest.fail(f"provide read() for {type(guard).__name__}: {resource}")

    def reopen(self, guard: Any) -> AbstractAsyncContextManager[Any]:
        """Open one more guard, as another process would: on the same resources where that is possible."""
        pytest.fail(f"provide reopen() for {type(guard).__name__}: an async context manager")

    # What the promises are written with.

    async def refused(self, guard: Guard, resource: str, token: int) -> StaleTokenError:
        """Write, which must be refused and change nothing; return the error."""
        before = await self.read(guard, resource), await guard.highest(resource)
        with pytest.raises(StaleTokenError) as refusal:
            await self.write(guard, resource, token, "stale")
        after = await self.read(guard, resource), await guard.highest(resource)
        assert after == before, "a refused write changed the resource"
        assert refusal.value.resource == resource
        assert refusal.value.token == token
        return refusal.value

    async def accepted(self, guard: Guard, resource: str, token: int, value: str) -> None:
        """Write, which must be accepted and be read back."""
        await self.write(guard, resource, token, value)
        assert await self.read(guard, resource) == value
        assert await guard.highest(resource) == token
