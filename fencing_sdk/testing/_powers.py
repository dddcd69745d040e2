"""
Powers that what is under test may lack: promises about them are not collected, instead of skipped or passed unseen.

    class GuardUnderTest:
        several: bool = False          # a subclass declares what it has

        @needs("several")
        async def test_all_or_nothing(self, guard): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


def needs(*powers: str) -> Callable[[F], F]:
    """Collect a promise only for a suite that declares all of these *powers*."""

    def mark(promise: F) -> F:
        promise.__dict__["powers"] = powers
        return promise

    return mark


def collect_by_power(suite: type) -> None:
    """Hide the promises whose powers *suite* does not declare, and show those whose powers it declares again."""
    for name, promise in _promises_with_powers(suite).items():
        if vars(suite).get(name) is not promise:  # where it is defined it stays, for other subclasses
            setattr(suite, name, promise if all(getattr(suite, power) for power in promise.powers) else None)


def _promises_with_powers(suite: type) -> dict[str, Any]:
    """The promises that need declared powers, as first defined, even if a subclass replaced them."""
    found: dict[str, Any] = {}
    for parent in reversed(suite.__mro__):
        found |= {name: value for name, value in vars(parent).items() if getattr(value, "powers", None)}
    return found
