"""
Hands events to observers, whose failures stay away from locking; and the logger of the package.

The events themselves are in `fencing_sdk.events`, which a program without observers does not load.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

from fencing_sdk.errors import ConfigurationError, shown

logger = logging.getLogger("fencing_sdk")
"""Has no handler: where logging is not configured, Python then writes warnings to standard error."""


def keep_off_console() -> None:
    """For programs of this package, which report losses in their own words: log only where logging is configured."""
    logger.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the lock *name*. ``at`` is on the client's monotonic clock, in seconds."""

    kind: ClassVar[str] = "event"
    name: str
    at: float
    holder: str | None
    """
    The acquisition: the public digest of its owner id, as in `Lease.holder`, `LockClient.inspect` and the HTTP header.
    None only in an event of a guard whose token came without it, and of a job that got no lock.
    """

    def as_dict(self) -> dict[str, object]:
        """The event as plain values, with its ``kind``: what a recording or a log takes."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}


Observer = Callable[[Event], None]
"""Called in the event loop, so it must be quick. What it raises is logged and goes no further."""


class Meter(ABC):
    """
    An observer that only counts and measures. The client calls these methods for what comes with every lease.

    To make an event, and the digest of the owner id in it, costs more than to count it. Every other event comes by a
    call, as to any observer; to a meter inside another observer all of them do.
    """

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Count *event*, of any kind."""

    @abstractmethod
    def job_made(self, name: str) -> None:
        """A function was decorated as a job, *name* being the template of its locks."""

    @abstractmethod
    def acquiring(self, name: str) -> None:
        """An acquisition begins."""

    @abstractmethod
    def acquired(self, name: str, waited: float) -> None:
        """A lease is held, so many seconds after its acquisition began."""

    @abstractmethod
    def renewed(self, name: str, spare: float) -> None:
        """A renewal was confirmed when so many seconds were left of the deadline."""

    @abstractmethod
    def released(self, name: str, held_for: float) -> None:
        """A lease ended, so many seconds after its grant."""

    @abstractmethod
    def accepted(self, name: str, token: int) -> None:
        """A guard accepted a token for the resource *name*: in a write, or to raise its fence."""


class Observers:
    """Hands events to every observer and keeps their failures away from locking."""

    __slots__ = ("_meters", "_observers", "any", "others")

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = _checked(observers)
        self._meters = tuple(observer for observer in self._observers if isinstance(observer, Meter))
        self.others = tuple(observer for observer in self._observers if not isinstance(observer, Meter))
        """Observers that are not a `Meter`."""
        self.any = bool(self._observers)
        """`bool(self)` as an attribute, because every acquisition reads it."""

    def __bool__(self) -> bool:
        return self.any

    def emit(self, event: Event) -> None:
        """Call every observer; log and pass over one that raises."""
        self._emit(event, self._observers)

    def emit_to_others(self, event: Event) -> None:
        """Call the observers that are not a `Meter`; `measure` calls the meters."""
        self._emit(event, self.others)

    def measure(self, what: str, name: str, *numbers: float) -> None:
        """Call the method *what* of every `Meter`; one that raises is logged and passed over."""
        for meter in self._meters:
            try:
                getattr(meter, what)(name, *numbers)
            except (Exception, asyncio.CancelledError):
                logger.exception("observer %s failed on %s", shown(meter), what)

    def _emit(self, event: Event, observers: tuple[Observer, ...]) -> None:
        for observer in observers:
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
