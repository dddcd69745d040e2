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


def needs(power: str) -> Callable[[F], F]:
    """Collect a promise only for a suite that declares *power*."""

    def mark(promise: F) -> F:
        promise.__dict__["power"] = power
        return promise

    return mark


def collect_by_power(suite: type) -> None:
    """Hide the promises whose power *suite* does not declare, and show those whose power it declares again."""
    for name, promise in _promises_with_a_power(suite).items():
        if vars(suite).get(name) is not promise:  # where it is defined it stays, for other subclasses
            setattr(suite, name, promise if getattr(suite, promise.power) else None)


def _promises_with_a_power(suite: type) -> dict[str, Any]:
    """The promises that need a declared power, as first defined, even if a subclass replaced them."""
    found: dict[str, Any] = {}
    for parent in reversed(suite.__mro__):
        found |= {name: value for name, value in vars(parent).items() if getattr(value, "power", None)}
    return found
