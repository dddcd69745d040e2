"""What a test sees in a store: the holders of a name, and one request of an owner at a time."""

from __future__ import annotations

from fencing_sdk._values.claim import Holder, holders_in
from fencing_sdk.abc import Backend


async def holders(backend: Backend, name: str) -> list[Holder]:
    """Return all who hold *name*."""
    (seen,) = await backend.tickets([name])
    return holders_in(name, seen)


async def holder(backend: Backend, name: str) -> Holder | None:
    """Return the one who holds *name*, or None."""
    return next(iter(await holders(backend, name)), None)
