"""The stage that the promises are played on: what a subclass declares and provides."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from fencing_sdk._values.claim import Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import StaleTokenError
from fencing_sdk.testing._powers import collect_by_power

RESOURCE = "invoices/42"
OLD = Token(33, "aaaaaaaa")
NEW = Token(34, "bbbbbbbb")
CONFLICTING = Token(34, "cccccccc")
"""The same number, given to another holder."""


class GuardUnderTest:
    """
    What `fencing_sdk.testing.GuardSuite` knows about the guard under test.

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
