"""What happens to leases, told to observers as frozen values."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

from fencing_sdk.errors import ConfigurationError, LossReason, shown

logger = logging.getLogger("fencing_sdk")
"""It has no handler: where logging is not configured, Python then writes its warnings to standard error."""


def keep_off_console() -> None:
    """For programs of this package, which tell losses in their own words: log only where logging is configured."""
    logger.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the lock *name*. ``at`` is on the client's monotonic clock, in seconds."""

    kind: ClassVar[str] = "event"
    name: str
    at: float

    def as_dict(self) -> dict[str, object]:
        """The event as plain values, with its ``kind``: what a recording or a log takes."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquiring(Event):
    """An acquisition begins."""

    kind: ClassVar[str] = "acquiring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired(Event):
    """A lease is held."""

    kind: ClassVar[str] = "acquired"
    token: int
    holder: str
    ttl: float
    waited: float
    """Seconds since the acquisition began."""
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """The store confirmed a renewal."""

    kind: ClassVar[str] = "renewed"
    token: int
    spare: float
    """Seconds that were left of the old deadline when the answer came: the early warning."""
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalLate(Event):
    """The heartbeat woke too late: the event loop was blocked or the process did not run."""

    kind: ClassVar[str] = "renewal_late"
    token: int
    late: float
    """Seconds after the moment the renewal was due."""
    stack: str | None
    """What the loop's thread was doing meanwhile, innermost call last; None where it was not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(Event):
    """A renewal had no answer. It is tried again until the deadline."""

    kind: ClassVar[str] = "renewal_failed"
    token: int
    error: str
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """The lease is over against our will; its work is being cancelled."""

    kind: ClassVar[str] = "lost"
    token: int
    reason: LossReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """The lease was given back. ``confirmed`` tells whether the store answered in time."""

    kind: ClassVar[str] = "released"
    token: int
    held_for: float
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(Event):
    """An acquisition without an answer was given up; it is released by claim in the background."""

    kind: ClassVar[str] = "abandoned"
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRaised(Event):
    """A guard refuses every lower token from now on."""

    kind: ClassVar[str] = "fence_raised"
    token: int
    resource: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRejected(Event):
    """A guard refused a write made under this lock, or refused to raise its fence."""

    kind: ClassVar[str] = "stale_rejected"
    token: int
    resource: str
    fence: int
    conflict: bool


Observer = Callable[[Event], None]
"""Called in the event loop, so it must be quick. What it raises is logged and goes no further."""


class Observers:
    """Hands events to every observer and keeps their failures away from locking."""

    __slots__ = ("_observers",)

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = _checked(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def emit(self, event: Event) -> None:
        """Tell everybody; an observer that raises is logged and passed over."""
        for observer in self._observers:
            try:
                observer(event)
            except (Exception, asyncio.CancelledError):  # no await here: it looked at a cancelled task, we are not one
                logger.exception("observer %s failed on %s", shown(observer), event.kind)


def _checked(observers: object) -> tuple[Observer, ...]:
    if isinstance(observers, str | bytes) or not isinstance(observers, Iterable):
        msg = f"observers must be a sequence such as observers=[print], not {type(observers).__name__}"
        raise ConfigurationError(msg)
    return tuple(map(_check_observer, observers))


def _check_observer(observer: object) -> Observer:
    if not callable(observer):
        msg = f"observers must be callables that take one event, got {shown(observer)}"
        raise ConfigurationError(msg)
    if inspect.iscoroutinefunction(observer) or inspect.iscoroutinefunction(type(observer).__call__):
        msg = f"observers must be plain functions, got 'async def' {shown(observer)}; let it put events into a queue"
        raise ConfigurationError(msg)
    return observer
