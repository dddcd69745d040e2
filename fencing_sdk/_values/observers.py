"""Hands events to observers, whose failures stay away from locking; and the logger of the package."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable

from fencing_sdk.errors import ConfigurationError, StaleTokenError, shown
from fencing_sdk.events import Event, Observer, StaleRejected

logger = logging.getLogger("fencing_sdk")
"""It has no handler: where logging is not configured, Python then writes its warnings to standard error."""


def keep_off_console() -> None:
    """For programs of this package, which tell losses in their own words: log only where logging is configured."""
    logger.addHandler(logging.NullHandler())


def stale_rejected(error: StaleTokenError, *, name: str, at: float, holder: str | None) -> StaleRejected:
    """The event that tells *error*."""
    return StaleRejected(
        name=name,
        at=at,
        holder=holder,
        token=error.token,
        resource=error.resource,
        fence=error.fence,
        conflict=error.conflict,
    )


class Observers:
    """Hands events to every observer and keeps their failures away from locking."""

    __slots__ = ("_observers",)

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = _checked(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def emit(self, event: Event) -> None:
        """Tell every observer; one that raises is logged and passed over."""
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
